"""The GPU that compiled files are for, read from the files themselves.

A compiler that fixed its target at its first call stores code for one GPU under the key of another. The code reveals it.
Sources: ELF headers of NVIDIA's cubins and AMD's code objects, and the targets that PTX and AMD assembly name. A file that cannot
be parsed states no target, and is never refused for that.

The layout of ``e_flags`` is LLVM's ``BinaryFormat/ELF.h``, checked against what ptxas 12.8 to 13.4 and lld write.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from kcoord.keys.device import GPUTarget

HEAD = 64 << 10  # bytes at the beginning of a file: assembly names its target in its first lines
_ELF_HEADER = struct.Struct("<4sBB x B B 9x H 28x I")  # magic, class, data, OS ABI, ABI version, machine, flags
_CUDA, _AMDGPU = 190, 224
_PTX_TARGET = re.compile(rb"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
_AMDGCN_TARGET = re.compile(rb'^\s*\.amdgcn_target\s+"[^"]*-(gfx[0-9a-f]+)[:"]', re.MULTILINE)
_SM = re.compile(r"(?:sm_?)?(\d+)[a-z]?")
_GFX = re.compile(r"(gfx[0-9a-f]+)(?::.*)?")

_AMD_MACHINES = {
    0x2C: "gfx900", 0x2D: "gfx902", 0x2E: "gfx904", 0x2F: "gfx906", 0x30: "gfx908", 0x31: "gfx909", 0x32: "gfx90c",
    0x33: "gfx1010", 0x34: "gfx1011", 0x35: "gfx1012", 0x36: "gfx1030", 0x37: "gfx1031", 0x38: "gfx1032", 0x39: "gfx1033",
    0x3D: "gfx1035", 0x3E: "gfx1034", 0x3F: "gfx90a", 0x41: "gfx1100", 0x42: "gfx1013", 0x43: "gfx1150", 0x44: "gfx1103",
    0x45: "gfx1036", 0x46: "gfx1101", 0x47: "gfx1102", 0x48: "gfx1200", 0x49: "gfx1250", 0x4A: "gfx1151", 0x4C: "gfx942",
    0x4E: "gfx1201", 0x4F: "gfx950", 0x55: "gfx1152", 0x58: "gfx1153", 0x5A: "gfx1251",
}  # fmt: skip


def contradiction(recorded: Collection[str], target: GPUTarget | None) -> str:
    """``for cuda:80, not for cuda:90`` if `recorded`, from `recorded_targets`, contradicts `target`; else empty.

    Machine code records the GPU without its suffix: code for ``90`` and for ``"90a"`` contradicts neither. Files that record
    nothing, no target, and a target that is no GPU contradict nothing.
    """
    requested = _spelled(target.backend, target.arch) if recorded and target is not None else None
    if requested is None or requested in recorded:
        return ""
    return f"for {', '.join(recorded)}, not for {requested}"


class RecordedTargets:
    """Collects the targets of an artifact's files, one `add` for each file."""

    def __init__(self) -> None:
        self._code: set[str] = set()
        self._assembly: set[str] = set()

    def add(self, name: str, content: bytes) -> None:
        """`content` is the whole file, or at least its first `HEAD` bytes."""
        suffix, head = Path(name).suffix, content[:HEAD]
        if head.startswith(b"\x7fELF"):
            self._code |= _of_elf(head)
        elif suffix == ".ptx":
            self._assembly |= _found("cuda", _PTX_TARGET, head)
        elif suffix in (".amdgcn", ".s"):
            self._assembly |= _found("hip", _AMDGCN_TARGET, head)

    def result(self) -> tuple[str, ...]:
        """Targets as ``cuda:90`` or ``hip:gfx942``, sorted; none if no file names one. Several GPUs are all returned.

        Machine code overrides the assembly that it was made of.
        """
        backends = {target.partition(":")[0] for target in self._code}
        return tuple(sorted(self._code | {t for t in self._assembly if t.partition(":")[0] not in backends}))


def recorded_targets(directory: Path) -> tuple[str, ...]:
    """`RecordedTargets.result` of the files below `directory`. Raises OSError."""
    targets = RecordedTargets()
    for path in _plain_files(directory):
        with path.open("rb") as file:
            targets.add(path.name, file.read(HEAD))
    return targets.result()


def _plain_files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory):
        for path in (Path(parent, name) for name in names):
            if stat.S_ISREG(path.lstat().st_mode):  # opening a pipe would block
                yield path


def _spelled(backend: str, arch: object) -> str | None:
    """One spelling for ``90``, ``sm90`` and ``sm_90a``; for ``gfx942`` and ``gfx942:sramecc+``. None: no single GPU."""
    pattern = {"cuda": _SM, "hip": _GFX}.get(backend)
    match = pattern.fullmatch(str(arch)) if pattern else None
    return f"{backend}:{match[1]}" if match else None


def _found(backend: str, pattern: re.Pattern[bytes], text: bytes) -> set[str]:
    match = pattern.search(text)
    target = _spelled(backend, match[1].decode()) if match else None
    return {target} if target else set()


def _of_elf(head: bytes) -> set[str]:
    if len(head) < _ELF_HEADER.size:
        return set()
    _, width, order, _, version, machine, flags = _ELF_HEADER.unpack_from(head)
    if (width, order) != (2, 1):
        return set()
    if machine == _CUDA and version in (7, 8):  # the second ABI moved it one byte up
        return {f"cuda:{flags >> (version - 7) * 8 & 0xFF}"}
    if machine == _AMDGPU and version >= 1 and flags & 0xFF in _AMD_MACHINES:
        return {f"hip:{_AMD_MACHINES[flags & 0xFF]}"}
    return set()
