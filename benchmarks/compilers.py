"""Compilers that ranks run while the job starts: 4 ranks, cold and warm, stock and with kcoord, in one run."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.result import Result, figures
from tests.unit.backends.flydsl import rocm

_JOB = Path(__file__).with_name("compilers_job.py")
_RANKS = 4
_STOCK, _OURS = "torch.distributed.run", "kcoord_launch.torchrun"
_PLANS = (
    ("stock, one shared directory, cold", _STOCK, "shared"),
    ("stock, a directory per rank, cold", _STOCK, "own{RANK}"),
    ("kcoord, a directory per rank, cold", _OURS, "ours{RANK}"),
    ("stock, one shared directory, warm", _STOCK, "shared"),
    ("kcoord, warm", _OURS, "ours{RANK}"),
)
_COMPILERS = {
    "extension": ("torch", "C++ extension of torch"),
    "tvm_ffi": ("tvm_ffi", "tvm_ffi, one function"),
    "tilelang": ("tilelang", "TileLang, 2 GEMMs and a kernel in C"),
    "cutedsl": ("nvidia_cutlass_dsl", "CuTe DSL, 2 kernels"),
    "flydsl": ("flydsl", "FlyDSL, 2 kernels"),
    "cutile": ("cutile_cache", "cuTile, 4 kernels"),
    "nvcc": ("torch", "nvcc, by `kcoord cc`"),
}
"""The package that each needs, and its name in the table."""
_PLACES = (
    "HOME",
    "TORCH_EXTENSIONS_DIR",
    "TILELANG_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
    "FLYDSL_RUNTIME_CACHE_DIR",
    "CUDA_TILE_CACHE_DIR",
)
"""Variables of the directories that the compilers keep files in."""


def run() -> Result:
    """The compilers of ``COMPILERS`` (a list of names), or those that are installed."""
    columns = ["compiler", "directories", "wall s", "ratio to shared", "compiles"]
    result = Result(f"Compilers on {_RANKS} ranks", columns)
    asked = os.environ.get("COMPILERS", "").split() or [n for n, (needs, _) in _COMPILERS.items() if find_spec(needs)]
    for name in asked:
        with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
            shared = 0.0
            for plan, launcher, directory in _PLANS:
                found = figures("compilers", *_command(Path(root), name, launcher, directory), timeout=600)
                shared = shared or found["wall"]
                ratio, compiles = f"{found['wall'] / shared:.2f}", str(found["compiles"])
                result.rows.append([_COMPILERS[name][1], plan, f"{found['wall']:.1f}", ratio, compiles])
                print(f"  {name}, {plan}: {found['wall']:.1f} s", file=sys.stderr, flush=True)
    result.notes.append("seconds from barrier to barrier, without imports; one run of each")
    result.notes.append("an extension's warm run in stock: a run of ninja that finds nothing to do")
    return result


def _command(root: Path, name: str, launcher: str, directory: str) -> tuple[list[str], dict[str, str]]:
    place = str(root / directory.replace("{RANK}", "$RANK"))
    places = " ".join(f"{variable}={place}" for variable in _PLACES)
    shell = f"{places} {'OURS=1' if launcher is _OURS else ''} exec {sys.executable} {_JOB} {name}"
    ranks = ["--standalone", "--nproc-per-node", str(_RANKS), "--no-python", "bash", "-c", shell]
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "KCOORD_LOCAL_DIR": str(root / "local"),
        "CUTE_DSL_ARCH": "sm_90a",
    }
    if name == "flydsl":
        rocm_path = root / "rocm"
        variables |= {
            "ROCM_PATH": str(rocm_path if rocm_path.exists() else rocm.make(root)),
            "ARCH": "gfx942",
            "COMPILE_ONLY": "1",
        }
    return [sys.executable, "-m", launcher, *ranks], variables
