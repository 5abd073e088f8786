"""A directory that stands for ROCm's: FlyDSL needs its linker, and no GPU."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

KEYS_ITS_TRACES = find_spec("flydsl") is not None and not version("flydsl").startswith(("0.2.", "0.3.", "0.4."))
"""True for a release whose own cache kcoord leaves on."""
OWN_CACHE_OFF = {"FLYDSL_RUNTIME_CACHE_DIR": ""} if KEYS_ITS_TRACES else {}
_RUSTS = "lib/rustlib/*/bin/rust-lld"


@functools.lru_cache(maxsize=1)
def why_not() -> str:
    """Why FlyDSL cannot compile here; empty if it can."""
    if find_spec("flydsl") is None:
        return "needs flydsl"
    return "" if _linker() else "needs ld.lld, or rustup's rust-lld"


def make(root: Path) -> Path:
    """A ROCm below `root`, whose files a test may change."""
    found = _linker()
    assert found is not None
    made = root / "rocm"
    (made / "llvm" / "bin").mkdir(parents=True)
    (made / "llvm" / "bin" / "ld.lld").symlink_to(found)
    (made / "amdgcn" / "bitcode").mkdir(parents=True)
    return made


@functools.lru_cache(maxsize=1)
def _linker() -> Path | None:
    candidates = [Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm/bin/ld.lld"), shutil.which("ld.lld")]
    rustc = shutil.which("rustc")
    if rustc:
        printed = subprocess.run([rustc, "--print", "sysroot"], capture_output=True, text=True)
        candidates += sorted(Path(printed.stdout.strip()).glob(_RUSTS))
    return next((Path(each).resolve() for each in candidates if each and Path(each).is_file()), None)
