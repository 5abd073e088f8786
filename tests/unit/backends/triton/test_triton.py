"""Triton's adapter, with real compiles for a GPU that is not there, in real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kcoord.artifacts.manifest import MANIFEST_NAME, Manifest
from tests.support.sandbox import Sandbox, finish
from tests.support.triton_ranks import RANK, fork_rank, homes, hooked, report, run_ranks, totals

pytest.importorskip("triton")


def test_two_nodes_with_one_redis_and_one_store_still_compile_each_kernel_once(sandbox: Sandbox) -> None:
    from tests.support.redis_server import RedisServer

    with RedisServer() as server:
        shared = {"KCOORD_REDIS_URL": server.url, "KCOORD_STORE": str(sandbox.root / "store")}
        ranks = [
            fork_rank(sandbox, "--kernels", "6", **hooked(sandbox, r, local=f"node{r // 4}", **shared))
            for r in range(8)
        ]
        reports = [report(p) for p in ranks]
    assert totals(reports) == (6, 42)
    for node in (0, 1):  # each node's files name that node's own directory
        assert all(p.startswith(str(sandbox.root / f"node{node}")) for p in reports[node * 4]["paths"])
        group = next(next((sandbox.root / f"node{node}" / "triton").glob("*/__grp__*")).parent.glob("__grp__*"))
        children = json.loads(group.read_text())["child_paths"]
        assert all(Path(p).is_file() and Path(p).parent == group.parent for p in children.values())


def test_a_compile_imported_before_the_wrap_releases_its_waiters_too(sandbox: Sandbox) -> None:
    reports = run_ranks(sandbox, 3, "--kernels", "0", "--broken", "--early-import", "--slow", "0.5")
    assert all("this_name_does_not_exist" in r["error"] for r in reports)
    assert len({s for r in reports for s in map(tuple, r["spans"])}) == 3


def test_a_process_without_kcoord_in_the_same_directory_neither_hits_nor_disturbs(sandbox: Sandbox) -> None:
    """Its keys do not hold what kcoord's hold: what it compiled may be stale, and is not believed."""
    run_ranks(sandbox, 1)
    plain = report(sandbox.start(RANK, **hooked(sandbox, 0, TRITON_CACHE_MANAGER=None, KCOORD_DISABLE="1")))
    assert totals([plain]) == (4, 0)
    assert not plain["kcoord"]
    assert totals(run_ranks(sandbox, 1)) == (0, 4)


def test_kcoord_that_is_off_leaves_tritons_keys_as_they_are(sandbox: Sandbox) -> None:
    report(fork_rank(sandbox, **hooked(sandbox, 0, TRITON_CACHE_MANAGER=None)))
    off = report(fork_rank(sandbox, **hooked(sandbox, 0, KCOORD_DISABLE="1")))
    assert totals([off]) == (0, 4)


def test_always_compile_compiles_in_every_rank_and_waits_for_nobody(sandbox: Sandbox) -> None:
    run_ranks(sandbox, 1, "--kernels", "2")
    reports = run_ranks(sandbox, 2, "--kernels", "2", TRITON_ALWAYS_COMPILE="1")
    assert totals(reports) == (4, 0)
    assert totals(run_ranks(sandbox, 1, "--kernels", "2")) == (0, 2)


def test_a_dump_holds_every_stage_as_triton_documents(sandbox: Sandbox) -> None:
    dump = sandbox.root / "dump"
    run_ranks(sandbox, 1, "--kernels", "1", TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=str(dump))
    suffixes = {p.suffix for p in dump.glob("*/*")}
    assert {".ttir", ".ttgir", ".llir", ".ptx", ".cubin"} <= suffixes
    assert not list(dump.glob(f"*/{MANIFEST_NAME}"))


def test_an_overridden_kernel_is_used_and_never_shared(sandbox: Sandbox) -> None:
    dump = sandbox.root / "dump"
    (plain,) = run_ranks(sandbox, 1, "--kernels", "1", TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=str(dump))
    (ptx,) = dump.glob("*/scale.ptx")
    for path in ptx.parent.iterdir():
        if path != ptx:
            path.unlink()
    changed = ptx.read_text().replace("ret;", "bar.sync 0;\n\tret;", 1)
    assert changed != ptx.read_text()
    ptx.write_text(changed)
    for path in homes(sandbox):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    override = {"TRITON_KERNEL_OVERRIDE": "1", "TRITON_OVERRIDE_DIR": str(dump)}
    (overridden,) = run_ranks(sandbox, 1, "--kernels", "1", **override)
    assert overridden["cubins"] != plain["cubins"]
    assert homes(sandbox) == []
    (after,) = run_ranks(sandbox, 1, "--kernels", "1")
    assert after["cubins"] == plain["cubins"]


def test_an_unsupported_triton_is_left_alone_and_told_once(sandbox: Sandbox) -> None:
    program = (
        "import sys, triton; triton.__version__ = '3.3.1'\n"
        "knobs = triton.knobs; del triton.knobs; sys.modules['triton.knobs'] = None\n"  # it came with 3.4
        "import kcoord.backends.triton.cache_manager\n"
        "triton.knobs = sys.modules['triton.knobs'] = knobs\n"
        "import sys, runpy; sys.argv = ['rank.py', '--kernels', '2']\n"
        f"runpy.run_path({str(RANK)!r}, run_name='__main__')\n"
    )
    done = sandbox.run("-c", program, **hooked(sandbox, 0))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["compiled"]) == 2
    assert done.stderr.count("is older than 3.4") == 1
    assert homes(sandbox) == []
    assert not sandbox.processes()


def test_a_triton_that_lacks_a_name_of_an_import_compiles_as_without_kcoord(sandbox: Sandbox) -> None:
    program = (
        "import triton, triton.backends.compiler as backends\n"
        "kept = backends.GPUTarget; del backends.GPUTarget\n"
        "import kcoord.backends.triton.cache_manager\n"
        "backends.GPUTarget = kept\n"
        "import sys, runpy; sys.argv = ['rank.py', '--kernels', '2']\n"
        f"runpy.run_path({str(RANK)!r}, run_name='__main__')\n"
    )
    done = sandbox.run("-c", program, **hooked(sandbox, 0))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["compiled"]) == 2
    assert done.stderr.count("cannot import name 'GPUTarget'") == 1
    assert "kcoord stands aside from kernels" in done.stderr
    assert homes(sandbox) == []


def test_a_full_disk_in_mid_compile_leaves_the_kernel_with_its_process(sandbox: Sandbox) -> None:
    mount = sandbox.root / "tiny"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", mount], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        environment = hooked(sandbox, 0, TRITON_CACHE_DIR=str(mount / "triton"))
        done = report(fork_rank(sandbox, "--kernels", "2", **environment))
        assert totals([done]) == (2, 0)
        assert "full" in done["stderr"]
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


_HAS_C = shutil.which("gcc") and (Path(sysconfig.get_path("include")) / "Python.h").exists()


@pytest.mark.skipif(not _HAS_C, reason="needs gcc and Python's headers, as Triton itself does on a GPU")
def test_the_c_modules_that_triton_builds_are_built_once(sandbox: Sandbox) -> None:
    program = (
        "import os, pathlib, subprocess, triton.runtime.build as build\n"
        "src = '#include <Python.h>\\nstatic struct PyModuleDef m = {PyModuleDef_HEAD_INIT, \"one\"};'\n"
        "src += 'PyMODINIT_FUNC PyInit_one(void) { return PyModule_Create(&m); }'\n"
        "real = build._build\n"
        "def counted(*a, **k):\n"
        "    pathlib.Path(os.environ['BUILDS'], str(os.getpid())).touch()\n"
        "    return real(*a, **k)\n"
        "build._build = counted\n"
        "print(build.compile_module_from_src(src, 'one').__file__)\n"
    )
    builds = sandbox.root / "builds"
    builds.mkdir()
    ranks = [sandbox.start("-c", program, **hooked(sandbox, r, BUILDS=str(builds))) for r in range(4)]
    done = [finish(p) for p in ranks]
    assert [d.returncode for d in done] == [0] * 4, done[0].stderr
    assert len({d.stdout for d in done}) == 1
    assert len(list(builds.iterdir())) == 1


def test_a_miss_is_explained_by_the_variable_that_made_it(sandbox: Sandbox) -> None:
    run_ranks(sandbox, 1, "--kernels", "1")
    run_ranks(sandbox, 1, "--kernels", "1", TRITON_DISABLE_LINE_INFO="1")
    kcoord = ("-c", "from kcoord.cli import main; main()")
    newest = max(homes(sandbox), key=lambda home: (home / MANIFEST_NAME).stat().st_mtime_ns)
    digest = Manifest.decode((newest / MANIFEST_NAME).read_bytes()).key.digest
    told = sandbox.run_kcoord(*kcoord, "explain", digest[:16])
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].strip() == "env TRITON_DISABLE_LINE_INFO: unset → 1"


_LINES = """
import kcoord
kcoord.install()
import sys
sys.path.insert(0, sys.argv[1])
import triton, lines
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
triton.compile(ASTSource(lines.kernel, {"x": "*i32"}, {}), target=GPUTarget("cuda", 90, 32))
"""
_LINED = """
import triton
import triton.language as tl

@triton.jit
def helper(v): return v + 1
SPACE
@triton.jit
def kernel(x):
    tl.store(x, helper(tl.load(x)))
"""


@pytest.mark.parametrize(
    ("above", "told"),
    [
        ("# above both\n", ["first line: 8 → 9", "first line of lines.helper: 5 → 6"]),
        ("", ["first line: 8 → 9"]),
    ],
    ids=["above both", "between"],
)
def test_a_kernel_whose_first_line_alone_changed_says_so(sandbox: Sandbox, above: str, told: list[str]) -> None:
    """Its number is in Triton's key, for debuggers' sake."""
    file = sandbox.root / "lines.py"
    between = "" if above else "\n"
    for before, space in (("", ""), (above, between)):
        file.write_text(before + _LINED.replace("SPACE", space))
        done = sandbox.run("-B", "-c", _LINES, str(file.parent))
        assert done.returncode == 0, done.stderr
    keys = sorted(homes(sandbox), key=lambda home: (home / MANIFEST_NAME).stat().st_mtime_ns)
    digest = Manifest.decode((keys[-1] / MANIFEST_NAME).read_bytes()).key.digest
    explained = sandbox.run_kcoord("-c", "from kcoord.cli import main; main()", "explain", digest[:16])
    assert explained.returncode == 0, explained.stderr
    assert [line.strip() for line in explained.stdout.partition(f"to {digest[:12]}:")[2].splitlines()[1:]] == told


def test_a_replay_that_is_the_first_to_import_triton_hooks_it(sandbox: Sandbox) -> None:
    """As the workers of `kcoord warmup` do: the hook imports the replayer's modules in the middle of that import."""
    script = (
        "import kcoord; kcoord.install()\n"
        "from kcoord.backends.registry import replayer\n"
        "from kcoord.packs.recipe import Recipe\n"
        "try: replayer('triton').replay(Recipe('triton', 'nowhere', 'f', {}, 'cuda:90', 0.0, 0), None, False)\n"
        "except ModuleNotFoundError: pass\n"
        "from triton.runtime.autotuner import Autotuner\n"
        "assert hasattr(Autotuner.check_disk_cache, '__kcoord_stock__')\n"
    )
    done = sandbox.run("-c", script, TRITON_CACHE_MANAGER="kcoord.backends.triton.cache_manager:TritonCacheManager")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
