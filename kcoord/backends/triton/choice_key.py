"""The key of an autotuner's choice: the inputs that it depends on.

More than the tuning key of Triton, which is one process's: there the first call's constants decide for all later calls, here they
are another rank's, or another job's, and a configuration that was chosen for a small head must not meet a large one. So the key
also holds the constants of the call, the kinds of its other arguments, and the configurations that are left after pruning, as
pruning left them: whatever prunes them need not be known. What depends on values and addresses is left out, or ranks would not
agree; whether a choice that is found runs in the call is tried there.

Functions here raise `KeyFactorError` for a value without identity, with the reason.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kcoord.backends.triton import own_key
from kcoord.backends.triton.choice import FORMAT
from kcoord.backends.triton.inputs import JITCallable, inputs_of, is_triton
from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.function.lookup import is_project
from kcoord.keys.function.walk import content_of
from kcoord.keys.packages import Owner, owner_of

BACKEND = "triton-autotune"
_OF_THE_LAUNCH = ("grid", "warmup")
_SCALARS = (type(None), bool, int, float, str)
_FUNCTIONS = (JITCallable, types.FunctionType, functools.partial, type)
_HARMLESS = ("triton", "numpy", "torch.cuda", "builtins", "functools", "gc", "itertools", "math", "operator", "statistics",
             "sys", "time")  # fmt: skip
"""Modules that a benchmark function may use: they wait for no other rank."""
_BY_TIME = {"do_bench", "do_bench_cudagraph"}
"""Triton's own benchmark functions. How often they launch depends on how long it takes: nothing tunes in step through them."""
_BEYOND_THE_GPU = re.compile(r"\bsys\b|multimem|shmem|symm|\biris\b|triton_dist")
"""In the source of a kernel that may wait for another GPU: its scope of memory, and the libraries for it."""


def choice_key(kernel: Mapping[str, Any], call: Mapping[str, Any], configs: Sequence[str], name: str) -> CacheKey:
    """The key of a choice among `configs` (digests), but for the device. `kernel` is `kernel_factors`, `call` `call_factors`."""
    return CacheKey.of(BACKEND, name, format=FORMAT, configs=list(configs), **kernel, **call)


def kernel_factors(autotuner: Autotuner, target: Any) -> dict[str, Any]:
    """The factors of the autotuner itself, on Triton's `target`."""
    jit, _ = _inner(autotuner)
    inputs = inputs_of(jit)
    if inputs.problem:
        raise KeyFactorError(inputs.problem)
    in_step = waits(autotuner)
    if in_step:
        raise KeyFactorError(in_step)
    parameters = [[p.name, p.is_constexpr, p.do_not_specialize, p.do_not_specialize_on_alignment] for p in jit.params]
    return {
        "kernel": inputs.key.digest,
        "parameters": parameters,
        "options": [bool(getattr(jit, "debug", None)), bool(getattr(jit, "noinline", None))],
        "triton": str(own_key.home().triton_key()),
        "compiler": make_backend(target).hash(),
        "tuned_by": list(autotuner.keys),
        "restored": [list(autotuner.reset_to_zero), list(autotuner.restore_value)],
        "hooks": {
            name: said_by(getattr(autotuner, name))
            for name in ("pre_hook", "post_hook")
            if getattr(autotuner, f"user_defined_{name}")
        },
        "bench": _bench_factors(autotuner),
    }


def waits(autotuner: Autotuner) -> str:
    """Why ranks may have to tune it in step, so that all of them measure or none; empty if each can measure alone.

    Triton's own functions measure for a time, so nothing that waits can work with them; a function that launches a fixed number
    of times is one that it can work with.
    """
    try:
        jit, _ = _inner(autotuner)
        functions = [jit, *inputs_of(jit).functions]
    except KeyFactorError:
        functions = []  # it tunes something else
    if any(_BEYOND_THE_GPU.search(str(getattr(each, "src", ""))) for each in functions):
        return "it may communicate with other GPUs, whose ranks have to tune in step with this one"
    bench = _own_bench(autotuner)
    try:
        alone = bench is None or _waits_for_nobody(bench)
    except KeyFactorError:
        alone = False
    return "" if alone else "its benchmark function (do_bench) may wait for other ranks"


def named(autotuner: Autotuner, args: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments by name, as Triton names them."""
    return dict(zip(autotuner.arg_names, args, strict=False))


def call_factors(
    autotuner: Autotuner,
    tuning_key: tuple[Any, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    configs: Sequence[Any],
) -> dict[str, Any]:
    """The factors of the call, as plain data. `configs` are those that pruning left.

    An argument that is no constant counts by its kind alone: ranks whose lengths or addresses differ are to agree.
    """
    jit, heuristics = _inner(autotuner)
    bound = named(autotuner, args) | dict(kwargs)
    runtime = {p.name for p in jit.params if not p.is_constexpr}
    constants = {name: value for name, value in bound.items() if name not in runtime and name not in _OF_THE_LAUNCH}
    found = [_heuristic(heuristics, {**bound, **config.all_kwargs()}) for config in configs] if heuristics else []
    return {
        "tuning_key": plain(tuple(tuning_key)),
        "constants": {name: plain(value) for name, value in constants.items()},
        "arguments": {name: _kind(value) for name, value in bound.items() if name in runtime},
        "heuristics": found if any(each != found[0] for each in found) else found[:1],
    }


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
    if hasattr(value, "base"):
        found.append(_size(value.base))
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
    content = content_of(function, skip=is_triton)
    return content.factors() | {"env": {name: os.environ.get(name) for name in content.variables}}


def plain(value: Any) -> Any:
    """`value` as data that a recipe can hold. Functions and data types are replaced by what identifies them."""
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


def _inner(autotuner: Autotuner) -> tuple[JITFunction, list[Heuristics]]:
    """The kernel, and the heuristics on the way to it, as they are applied."""
    heuristics, function = [], autotuner.fn
    while type(function) is Heuristics:
        heuristics.append(function)
        function = function.fn
    if not isinstance(function, JITFunction):
        raise KeyFactorError(f"it tunes a {type(function).__qualname__}, not a kernel")
    return function, heuristics


def _heuristic(levels: list[Heuristics], given: dict[str, Any]) -> dict[str, Any]:
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
    """The benchmark function that somebody has put in the place of Triton's."""
    bench = autotuner._do_bench
    own = vars(autotuner).get("do_bench")  # kept at its first use, or put there by somebody
    if bench is None and own is not None and own != driver.active.get_benchmarker():
        bench = own
    is_installed = isinstance(bench, types.FunctionType) and not is_project(bench)
    return None if is_installed and bench.__module__ == Autotuner.__module__ else bench


def _waits_for_nobody(bench: Any) -> bool:
    """True if `bench` measures by Triton's functions, and everything else that it uses is known to stay in this process."""
    while isinstance(bench, functools.partial):
        if not all(type(v) in _SCALARS for v in (*bench.args, *bench.keywords.values())):
            return False
        bench = bench.func
    if not isinstance(bench, types.FunctionType):
        return False
    if not is_project(bench):
        return is_triton(bench.__module__)
    if not _BY_TIME & set(bench.__code__.co_names):
        return False
    content = content_of(bench, skip=is_triton)
    followed = {label for label, said in content.code.items() if isinstance(said, tuple) and said[0] != "file"}
    if any(label.rpartition(".")[2] in _BY_TIME for label in followed):
        return False  # one of that name, of somebody else's
    values = [*content.globals.items(), *content.closure.items(), *content.defaults.items()]
    return len(followed) == len(content.code) and all(_is_harmless(name, value, followed) for name, value in values)


def _is_harmless(name: str, value: Any, followed: set[str]) -> bool:
    if any(name == each or name.startswith(f"{each}.") for each in _HARMLESS):
        return True
    if owner_of(name.rpartition(".")[0] or name) is not Owner.PROJECT:
        return False
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "function":
        return value[1] in followed or is_triton(str(value[1]))
    return type(value) in _SCALARS


def is_finite(timing: Any) -> bool:
    """True if a measurement shows that its configuration runs at all."""
    first = timing[0] if isinstance(timing, (list, tuple)) and timing else timing
    return isinstance(first, (int, float)) and math.isfinite(first)
