"""System calls of a warm kernel, counted by strace: kcoord makes fewer than Triton's own cache does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sandbox import PROGRAMS
from tests.support.triton_ranks import MANAGER

pytest.importorskip("triton")

_FEW, _MANY = 20, 30  # more than the first requests of a process, each of which looks for an agent
_CALLS = "openat,mkdir,newfstatat,statx,close,lseek,ioctl,readlink,getdents64"  # reads of a pipe at the start vary
_PROGRAM = f"""
import sys
sys.path.insert(0, {str(PROGRAMS)!r})
import triton, kernels
kernels.build_scale(2)
if "kcoord" in sys.modules:
    from kcoord.backends.triton import inputs
    from kcoord.keys.tools import machine_cache
    inputs._process.due = inputs._LOOK_AT_TOOLS = 1e12  # the clock decides when a launch looks at the tools' files
    machine_cache._RACY = 0
for n in range(int(sys.argv[1])):
    kernels.build_scale(n + 3)
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Calls of the main thread for each kernel, by name, of ``stock`` and of ``kcoord``."""
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    root = tmp_path_factory.mktemp("warm")
    plain = {n: v for n, v in os.environ.items() if not n.startswith(("KCOORD_", "TRITON_"))}
    stock = plain | {"TRITON_CACHE_DIR": str(root / "stock")}
    ours = {"TRITON_CACHE_DIR": str(root / "local" / "triton"), "TRITON_CACHE_MANAGER": MANAGER}
    alone = {"KCOORD_LOCAL_DIR": str(root / "local"), "KCOORD_SPAWN": "0", "KCOORD_SOCKET": str(root / "nobody")}
    kcoord = plain | ours | alone
    for environ in (stock, kcoord, kcoord):  # cold; and warm once, which lists what it has verified
        subprocess.run([sys.executable, "-c", _PROGRAM, str(_MANY)], env=environ, check=True)
    return {"stock": _each(stock, root), "kcoord": _each(kcoord, root)}


def _each(environ: dict[str, str], root: Path) -> dict[str, int]:
    few, many = (_calls(environ, root / "calls", count) for count in (_FEW, _MANY))
    found = {name: (many[name] - few.get(name, 0)) / (_MANY - _FEW) for name in many}
    assert all(count.is_integer() for count in found.values()), f"these depend on more than the kernels: {found}"
    return {name: int(count) for name, count in found.items() if count}


def _calls(environ: dict[str, str], output: Path, kernels: int) -> dict[str, int]:
    strace = ["strace", "-qq", "-c", "-U", "name,calls", "-e", f"trace={_CALLS}", "-o", str(output)]
    done = subprocess.run(
        [*strace, sys.executable, "-c", _PROGRAM, str(kernels)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    rows = (line.split() for line in output.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit() and row[0] != "total"}


def looks(counts: dict[str, int]) -> int:
    """At the status of a file, by whatever call this C library has for that."""
    return sum(counts.get(name, 0) for name in ("newfstatat", "statx", "stat", "lstat", "fstat"))


def test_a_warm_kernel_is_not_read_twice(counted: dict[str, dict[str, int]]) -> None:
    """Triton reads seven files, and without kcoord the group's listing; kcoord opens the manifest."""
    assert counted["stock"]["openat"] == 8
    assert counted["kcoord"]["openat"] == 8


def test_a_warm_kernel_costs_fewer_system_calls_than_without_kcoord(counted: dict[str, dict[str, int]]) -> None:
    """kcoord: a status of eight files, the manifest and their directory, and of the library that the kernel links, for its key.
    Triton: its directory made anew, a listing opened and read, a status of each file.
    """
    stock, kcoord = counted["stock"], counted["kcoord"]
    assert (stock["mkdir"], kcoord.get("mkdir", 0)) == (1, 0)
    of_triton = 10  # the directory twice, the listing, seven files
    by_python = (looks(stock) - of_triton) // 8  # in opening one file
    assert looks(kcoord) == 11 + 7 * by_python
    assert sum(kcoord.values()) < sum(stock.values())
