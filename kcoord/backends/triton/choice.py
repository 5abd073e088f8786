"""An autotuner's choice: its key, and its content as ranks share it.

The key holds more than Triton's tuning key, which is one process's: there the first call's constants decide for all later calls,
here they are another rank's, or another job's, and a configuration that was chosen for a small head must not meet a large one. So
it also holds the constants of the call, the kinds of its other arguments, and the configurations that pruning left: whatever
prunes them need not be known. Values and addresses are left out, or ranks would not agree; each rank tries whether a choice that
it finds runs in its call.

Other ranks' content is untrusted. Functions here raise `KeyFactorError` for a value without identity, with the reason.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack
import triton
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kcoord.backends.triton import own_key
from kcoord.backends.triton.additions import is_triton
from kcoord.backends.triton.inputs import JITCallable, inputs_of, kernel_content
from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.packages import Owner, owner_of

BACKEND = "triton-autotune"
FORMAT = 1
LONGEST_TEXT = 500  # characters
_MOST_TIMINGS = 1000
_OF_THE_LAUNCH = ("grid", "warmup")
_SCALARS = (type(None), bool, int, float, str)
_FUNCTIONS = (JITCallable, types.FunctionType, functools.partial, type)
_BEYOND_THE_GPU = re.compile(r"\bsys\b|multimem|shmem|symm|\biris\b|triton_dist")
"""In the source of a kernel that may wait for another GPU: its scope of memory, and the libraries for it."""


def choice_key(
    autotuner: Autotuner,
    tuning_key: tuple[Any, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    configs: Mapping[str, Any],
) -> CacheKey:
    """The key of a choice among `configs` (by digest) for a call, but for the device.

    An argument that is no constant counts by its kind alone: ranks whose lengths or addresses differ are to agree.
    """
    jit, levels = _kernel_of(autotuner)
    inputs = inputs_of(jit)
    if problem := inputs.problem or waits(autotuner):
        raise KeyFactorError(problem)
    bound = named(autotuner, args) | dict(kwargs)
    runtime = {p.name for p in jit.params if not p.is_constexpr}
    constants = {name: value for name, value in bound.items() if name not in runtime and name not in _OF_THE_LAUNCH}
    factors = {
        "format": FORMAT,
        "configs": list(configs),
        "tuning_key": plain(tuple(tuning_key)),
        "constants": {name: plain(value) for name, value in constants.items()},
        "arguments": {name: _kind(value) for name, value in bound.items() if name in runtime},
        "heuristics": [_computed(levels, {**bound, **each.all_kwargs()}) for each in configs.values()]
        if levels
        else [],
        "kernel": inputs.key.digest,
        "parameters": [
            [p.name, p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment] for p in jit.params
        ],
        "triton": str(own_key.home().triton_key()),
        "restored": [list(autotuner.reset_to_zero), list(autotuner.restore_value)],
        "hooks": {
            name: said_by(getattr(autotuner, name))
            for name in ("pre_hook", "post_hook")
            if getattr(autotuner, f"user_defined_{name}")
        },
        "bench": _bench_factors(autotuner),
    }
    return CacheKey.of(BACKEND, autotuner.base_fn.__name__, **factors)


def waits(autotuner: Autotuner) -> str:
    """Why ranks may have to tune it in step, so that all of them measure or none; empty if each can measure alone.

    Triton's own functions launch for a time, not a number of times, so that nothing which waits can work with them.
    """
    try:
        jit, _ = _kernel_of(autotuner)
        functions = [jit, *inputs_of(jit).functions]
    except KeyFactorError:
        functions = []  # it tunes something else
    if any(_BEYOND_THE_GPU.search(str(getattr(each, "src", ""))) for each in functions):
        return "it may communicate with other GPUs, whose ranks have to tune in step with this one"
    bench = _own_bench(autotuner)
    return "" if bench is None or _is_tritons(bench) else "its benchmark function (do_bench) may wait for other ranks"


def named(autotuner: Autotuner, args: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments by name, as Triton names them."""
    return dict(zip(autotuner.arg_names, args, strict=False))


def _kind(value: Any) -> Any:
    """An argument's type, without its value. Triton's tuning key lacks a descriptor's type, and which arguments are None."""
    if hasattr(value, "dtype"):
        return str(value.dtype)
    if isinstance(value, (tuple, list)):
        return [_kind(each) for each in value]
    base = getattr(value, "base", None)  # a tensor descriptor; hooks set its block
    return [type(value).__name__, _kind(base)] if hasattr(base, "dtype") else type(value).__name__


def measured_as(key: CacheKey, bound: Mapping[str, Any]) -> str:
    """A digest of `key` and of the sizes in a call: measurements of calls that differ in it are not compared.

    `bound` has the call's arguments by name. Empty if they cannot be told.
    """
    try:
        sizes = sorted((name, repr(_size(value))) for name, value in bound.items())
    except Exception as error:  # noqa: BLE001 - a tensor's own methods
        let_through(error)
        return ""
    return hashlib.sha256(f"{key.digest} {sizes}".encode()).hexdigest()


def _size(value: Any) -> Any:
    """A number as it is; of a tensor, or a descriptor of one, the shape, the strides and the alignment."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, (tuple, list)):
        return [_size(each) for each in value]
    found: list[Any] = [type(value).__name__, *(_size(list(getattr(value, name, ()))) for name in ("shape", "strides"))]
    if callable(getattr(value, "stride", None)):
        found.append(list(value.stride()))
    if callable(getattr(value, "data_ptr", None)):
        found.append(value.data_ptr() % 16)
    return found


def config_digest(config: Any) -> str:
    """The digest that identifies a configuration."""
    if getattr(config, "ir_override", None):
        raise KeyFactorError("one of its configurations is overridden by a file (ir_override)")
    facts = {name: value for name, value in vars(config).items() if name not in ("kwargs", "pre_hook")}
    hook = None if config.pre_hook is None else said_by(config.pre_hook)
    facts = {name: plain(value) for name, value in facts.items()}
    return CacheKey.of(BACKEND, "config", kwargs=plain(dict(config.kwargs)), facts=facts, pre_hook=hook).digest


def said_by(function: Any) -> dict[str, Any]:
    """A host function by content, and by the variables of the environment that it reads."""
    content = kernel_content(function)
    return content.factors() | {"env": {name: os.environ.get(name) for name in content.variables}}


def plain(value: Any) -> Any:
    """`value` as plain data. Functions and data types are replaced by their digests and names."""
    if type(value) in _SCALARS:
        return value
    if type(value) in (tuple, list):
        return type(value)(plain(v) for v in value)
    if type(value) is dict and all(type(name) is str for name in value):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, triton.language.constexpr):
        return ("constexpr", plain(value.value))
    if type(value).__name__ == "dtype" and type(value).__module__.partition(".")[0] in ("torch", "triton"):
        return ("dtype", str(value))
    if isinstance(value, _FUNCTIONS):
        inputs = inputs_of(value)
        if inputs.problem:
            raise KeyFactorError(inputs.problem)
        return ("function", inputs.key.digest)
    raise KeyFactorError(
        f"a value of type {type(value).__qualname__} in its call or its configurations has no identity"
    )


def _kernel_of(autotuner: Autotuner) -> tuple[JITFunction, list[Heuristics]]:
    """The kernel, and the heuristics on the way to it, as they are applied."""
    levels, function = [], autotuner.fn
    while type(function) is Heuristics:
        levels.append(function)
        function = function.fn
    if not isinstance(function, JITFunction):
        raise KeyFactorError(f"it tunes a {type(function).__qualname__}, not a kernel")
    return function, levels


def _computed(levels: list[Heuristics], given: dict[str, Any]) -> dict[str, Any]:
    """The constants that heuristics compute from the call's arguments."""
    computed: dict[str, Any] = {}
    for level in levels:
        for name, compute in level.values.items():
            computed[name] = compute({**given, **computed})
    return {name: plain(value) for name, value in computed.items()}


def _bench_factors(autotuner: Autotuner) -> Any:
    numbers = [plain(getattr(autotuner, name, None)) for name in ("num_warmups", "num_reps", "use_cuda_graph")]
    bench = _own_bench(autotuner)
    return numbers if bench is None else [*numbers, said_by(bench)]


def _own_bench(autotuner: Autotuner) -> Any | None:
    """The user's benchmark function; None if it is Triton's default."""
    bench = autotuner._do_bench
    own = vars(autotuner).get("do_bench")  # Triton's, kept at its first use, or the user's
    if bench is None and own is not None and own != driver.active.get_benchmarker():
        bench = own
    return bench


def _is_tritons(bench: Any) -> bool:
    """True if `bench` is a benchmark function of Triton's, perhaps with plain arguments."""
    while isinstance(bench, functools.partial):
        if not all(type(v) in _SCALARS for v in (*bench.args, *bench.keywords.values())):
            return False
        bench = bench.func
    return (
        isinstance(bench, types.FunctionType) and owner_of(bench) is not Owner.PROJECT and is_triton(bench.__module__)
    )


def is_finite(timing: Any) -> bool:
    """True if a measurement shows that its configuration runs at all."""
    first = timing[0] if isinstance(timing, (list, tuple)) and timing else timing
    return isinstance(first, (int, float)) and math.isfinite(first)


# The content.


def pack(digest: str, config: Any, timings: list[Any] | None) -> bytes:
    """The choice of `config`, whose `config_digest` is `digest`. Its text is for people.

    `timings` are in the order of the configurations' digests. They are left out if they are not as Triton measures.
    """
    if timings is not None and (len(timings) > _MOST_TIMINGS or not all(map(_is_timing, timings))):
        timings = None
    document = {"format": FORMAT, "config": digest, "text": str(config)[:LONGEST_TEXT], "timings": timings}
    return bytes(msgpack.packb(document, unicode_errors="surrogatepass"))


def _unpacked(content: bytes) -> dict[str, Any]:
    """The document; empty if `content` is no choice, or another version's."""
    try:
        document = msgpack.unpackb(content, unicode_errors="surrogatepass")
    except (ValueError, msgpack.exceptions.UnpackException):
        return {}
    return document if isinstance(document, dict) and document.get("format") == FORMAT else {}


def chosen_in(content: bytes) -> str:
    """The digest of the configuration; empty if `content` is no choice."""
    digest = _unpacked(content).get("config")
    return digest if isinstance(digest, str) else ""


def timings_in(content: bytes, count: int) -> list[Any] | None:
    """The measurement of each of `count` configurations, as Triton has them; None if `content` lacks one."""
    timings = _unpacked(content).get("timings")
    if not isinstance(timings, list) or len(timings) != count or not all(map(_is_timing, timings)):
        return None
    return timings


def pack_timing(timing: Any) -> bytes | None:
    """One measurement; None if it is not as Triton measures."""
    return bytes(msgpack.packb(timing)) if _is_timing(timing) else None


def timing_in(packed: Any) -> Any | None:
    """None if `packed` is no measurement."""
    try:
        timing = msgpack.unpackb(packed) if isinstance(packed, bytes) else None
    except (ValueError, msgpack.exceptions.UnpackException):
        return None
    return timing if _is_timing(timing) else None


def are_comparable(timings: Iterable[Any]) -> bool:
    """True if the measurements are of one kind: all are numbers, or all have as many quantiles."""
    return len({len(timing) if isinstance(timing, (list, tuple)) else 0 for timing in timings}) <= 1


def _is_timing(value: Any) -> bool:
    """Milliseconds: one number, or one for each quantile. Infinity: it does not run."""
    numbers = value if isinstance(value, list) and 0 < len(value) <= 100 else [value]
    return all(type(number) in (int, float) and number >= 0 for number in numbers)
