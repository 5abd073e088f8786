"""Kernels that are not shared, and why: nobody has tried their kind, or they depend on code or files that no key holds.

A kernel's own code (``T.import_source``) may include TileLang's templates, CUTLASS, CUDA's headers and the standard library.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kcoord.backends.tilelang.request import Kernel
from kcoord.backends.wrapping import wraps

_EXECUTIONS = ("tvm_ffi", "cython")
_CALLBACK = "tilelang_callback_"
_POSTPROC = (f"{_CALLBACK}cuda_postproc", f"{_CALLBACK}c_host_postproc")
_DEVICE_FLAGS = "tl.device_compile_flags"
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_READS = re.compile(r"-[iI]|--include|--imacros|--pre-include|--system-include|--options-file|-optf|@|[^/]*[=,]-[iI]")
"""Flags of a file that is read, or of a place to look for headers."""
_NAMES_PATH = re.compile(r"(?!-[DU]).*/")
_GAP = r"(?:[ \t]|/\*.*?\*/)*"
_DIRECTIVE = re.compile(
    rf"^(?![ \t]*//).*?(?:#|%:){_GAP}(?:include(?:_next)?|import|embed)\b{_GAP}(?:\"([^\"\n]+)\"|<([^>\n]+)>|([^\n]*))",
    re.MULTILINE,
)
_STANDARD = re.compile(r"\w+|(?:assert|float|inttypes|limits|math|stdbool|stddef|stdint|stdio|stdlib|string)\.h")
"""Headers of C++ have no suffix."""

_registered: set[str] = set()
"""Names of TileLang's callbacks that the script has registered."""


CALLS = {"core:_register_global_func": "_ _ _", ":get_global_func": "_ allow_missing="}
"""Names of tvm_ffi. TVM does not show the function behind a name, so each registration is noted."""


def noting_callbacks(native: Any) -> Callable[..., Any]:
    """`_register_global_func`, which notes each callback that is registered from now on."""

    @wraps(native)
    def register_global_func(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        is_own = str(getattr(function, "__module__", "")).startswith("tilelang.")  # in the key by TileLang's version
        if str(name).startswith(_CALLBACK) and not is_own:
            _registered.add(str(name))
        return native(name, function, *args, **kwargs)

    return register_global_func


def reason_not_shared(request: Kernel) -> str:
    """The reason why `request` must not be shared; empty if it may be."""
    import tvm_ffi

    kind = request.target.kind.name
    if request.execution not in _EXECUTIONS or kind not in ("cuda", "c", "llvm"):
        return f"kernels of {request.execution} for {kind} have not been tried"
    for name in (*_POSTPROC, *_registered):
        if tvm_ffi.get_global_func(name, allow_missing=True) is not None:
            return f"{name} is registered, whose code its key does not hold"
    return _of_flags(request) or _of_code(request)


def _of_flags(request: Kernel) -> str:
    """Why the kernel's flags, or those that nvcc takes from the environment, cannot be in a key."""
    configs = {getattr(name, "value", name): value for name, value in (request.pass_configs or {}).items()}
    own = [*_words(request.flags), *_words(configs.get(_DEVICE_FLAGS))]
    inherited = [word for name in _VARIABLES for word in _words(os.environ.get(name))]
    found = next((word for word in (*own, *inherited) if _READS.match(word)), "")
    found = found or next(filter(_NAMES_PATH.match, own), "")
    return f"{found} names files that its key does not hold" if found else ""


def _words(flags: Any) -> list[str]:
    """The words of one flag or several. Quotes separate, too."""
    given = [flags] if isinstance(flags, str) else flags or ()
    return [word for flag in given for word in re.split(r"[\s'\"]+", str(flag)) if word]


def _of_code(request: Kernel) -> str:
    """Why the files that the kernel's code includes cannot be in a key."""
    import tvm

    places = list(_held())
    for text in _strings(json.loads(str(tvm.ir.save_json(request.function)))):  # the IR's text has code in escapes
        if ".incbin" in text:
            return "its code has .incbin, whose file its key does not hold"
        for quoted, angled, macro in _DIRECTIVE.findall(text.replace("\\\n", "")):
            name = quoted or angled or macro.strip()
            is_plain = not macro and not any(part.startswith((".", "/")) for part in Path(name).parts)
            is_held = is_plain and any((place / name).is_file() for place in places)
            if not is_held and not _STANDARD.fullmatch(angled):
                return f"it includes {name or 'nothing'}, which its key does not hold"
    return ""


def _held() -> Iterator[Path]:
    """Directories of headers that each key holds: TileLang's templates, CUTLASS, and CUDA's headers, by CUDA's compiler."""
    from tilelang.env import CUDA_HOME, CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    yield Path(TILELANG_TEMPLATE_PATH)
    yield Path(CUTLASS_INCLUDE_DIR)
    if CUDA_HOME:
        yield from Path(CUDA_HOME).glob("targets/*/include")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
