"""Compilers that ranks run while the job starts: 4 ranks, cold and warm, stock and with kcoord, in one run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.result import Result, figures

_JOB = Path(__file__).with_name("compilers_job.py")
_RANKS = 4
_STOCK, _OURS = "torch.distributed.run", "kcoord_launch.torchrun"
_PLANS = (
    ("one shared directory, cold", _STOCK, "shared"),
    ("a directory per rank, cold", _STOCK, "own{RANK}"),
    ("kcoord-torchrun, a directory per rank, cold", _OURS, "ours{RANK}"),
    ("one shared directory, warm", _STOCK, "shared"),
    ("kcoord-torchrun, warm", _OURS, "ours{RANK}"),
)


def run() -> Result:
    """``torch.utils.cpp_extension.load_inline`` of one function that includes torch's headers."""
    result = Result(
        f"A C++ extension of torch on {_RANKS} ranks", ["directories", "wall s", "ratio to shared", "builds"]
    )
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        shared = 0.0
        for name, launcher, directory in _PLANS:
            found = figures("compilers", *_command(Path(root), launcher, directory), timeout=600)
            shared = shared or found["wall"]
            result.rows.append([name, f"{found['wall']:.1f}", f"{found['wall'] / shared:.2f}", str(found["builds"])])
            print(f"  {name}: {found['wall']:.1f} s", file=sys.stderr, flush=True)
    result.notes.append("seconds from barrier to barrier: the build or the load of one extension; one run of each")
    result.notes.append("stock, warm: a run of ninja that finds nothing to do")
    return result


def _command(root: Path, launcher: str, directory: str) -> tuple[list[str], dict[str, str]]:
    shell = f"TORCH_EXTENSIONS_DIR={root / directory.replace('{RANK}', '$RANK')} exec {sys.executable} {_JOB}"
    ranks = ["--standalone", "--nproc-per-node", str(_RANKS), "--no-python", "bash", "-c", shell]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "KCOORD_LOCAL_DIR": str(root / "local")}
    return [sys.executable, "-m", launcher, *ranks], variables
