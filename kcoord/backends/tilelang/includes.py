"""Headers that a kernel's own code (``T.import_source``) includes, beside TileLang's templates: by directories of its flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcoord.backends.tilelang.backend import Kernel

_DEVICE_FLAGS = "tl.device_compile_flags"
_DIRECTORIES = ("-isystem", "-iquote", "-idirafter", "--include-path", "--system-include", "-I")
_FILES = ("-include", "-imacros", "--pre-include")
_QUOTED = re.compile(r"#\s*include\s*\\*\"([^\"\\]+)")
"""In the text of the IR, where quotes are escaped."""


def directories(request: Kernel) -> Iterator[str]:
    """Those that the flags name, in one word or in two."""
    words = iter(_flags(request))
    for word in words:
        for flag in _DIRECTORIES:
            if word.startswith(flag):
                yield word.removeprefix(flag).lstrip("=") or next(words, "")
                break


def problem(request: Kernel, trees: Iterable[str]) -> str:
    """Why the headers cannot be in a key; empty if they are, in `trees`."""
    for word in _flags(request):
        if word.startswith(_FILES):
            return f"{word} includes a file that its key does not hold"
    places = [Path(tree) for tree in trees]
    if relative := next((str(place) for place in places if not place.is_absolute()), ""):
        return f"-I{relative} is relative"
    for name in _QUOTED.findall(str(request.function.script(show_meta=True))):
        if Path(name).is_absolute() or not any((place / name).is_file() for place in places):
            return f"it includes {name}, which lies in no directory of its flags"
    return ""


def _flags(request: Kernel) -> list[str]:
    """Words of the kernel's flags, and of those for the device."""
    configs = {getattr(name, "value", name): value for name, value in (request.pass_configs or {}).items()}
    device = configs.get(_DEVICE_FLAGS) or ()
    given = [*(request.flags or ()), *([device] if isinstance(device, str) else device)]
    return [word for flag in given for word in str(flag).split()]
