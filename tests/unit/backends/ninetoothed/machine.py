"""A machine for NineToothed that has no GPU: a stand-in for Triton's driver, and a CUDA library that is only linked."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_STANDIN = Path(__file__).with_name("standin")
_CUDA = (
    "CtxGetId", "DeviceGetAttribute", "FuncSetAttribute", "FuncSetCacheConfig", "GetErrorString", "LaunchKernel",
    "ModuleGetFunction", "ModuleLoadData", "ModuleUnload",
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def why_not() -> str:
    """Why NineToothed cannot compile here; empty if it can."""
    for package in ("torch", "triton", "ninetoothed"):
        if find_spec(package) is None:
            return f"needs {package}"
    return next((f"needs {tool}" for tool in ("nvcc", "gcc") if shutil.which(tool) is None), "")


def make(root: Path) -> dict[str, str]:
    """The variables of processes that use the machine, whose files are made below `root`."""
    site, lib = root / "site", root / "lib"
    shutil.copytree(_STANDIN, site / "standin", ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "standin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[triton.backends]\nstandin = standin\n")
    lib.mkdir()
    (lib / "cuda.c").write_text("".join(f"int cu{name}(void) {{ return 0; }}\n" for name in _CUDA))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", lib / "libcuda.so", lib / "cuda.c"], check=True)
    path, python = (os.environ.get(name, "") for name in ("PATH", "PYTHONPATH"))
    return {
        "PATH": f"{Path(sys.executable).parent}:{path}",  # NineToothed runs the ``python`` that it finds
        "PYTHONPATH": f"{site}:{python}" if python else str(site),
        "HOME": str(root),
        "LD_LIBRARY_PATH": str(lib),
        "LIBRARY_PATH": str(lib),
        "STANDIN_ARCH": "90",
        "TRITON_DEFAULT_BACKEND": "standin",
        "TRITON_DEFAULT_FP_FUSION": "1",  # Triton 3.9 warns without it
        "TRITON_DISABLE_LINE_INFO": "1",  # the code would name files below `root`
        "OMP_NUM_THREADS": "1",
    }
