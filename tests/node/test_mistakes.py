"""Mistakes, and the one line that names the cause and the remedy."""

from __future__ import annotations

import re
import socket
import sys
import venv
from pathlib import Path

import pytest

from kcoord_launch.interpreter import interpreter_of
from tests.support.command import KCOORD
from tests.support.ports import reserve_port
from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS, Sandbox

KERNEL = (
    "import kcoord; kcoord.connect().get_or_compile(kcoord.CacheKey.of('t', 'k'), lambda s: (s / 'k').write_text('k'))"
)


def lines(sandbox: Sandbox, *program: str, **environment: str | None) -> list[str]:
    """kcoord's lines of a job, but for the last."""
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", *program, **environment)
    assert done.returncode == 0, done.stderr
    *said, last = [line for line in done.stderr.splitlines() if line.startswith("kcoord: ")]
    assert " compiled, " in last
    return said


def test_a_store_that_nobody_has_made(sandbox: Sandbox) -> None:
    store = sandbox.root / "nowhere"
    assert lines(sandbox, sys.executable, "-c", KERNEL, KCOORD_STORE=str(store), KCOORD_STORE_CREATE="0") == [
        f"kcoord: the store cannot be used: {store}: there is no store here: make it once with 'kcoord store init', or look at "
        "KCOORD_STORE and its mount; training goes on, and artifacts stay on this node"
    ]
    assert not store.exists()


def test_several_nodes_without_a_store(sandbox: Sandbox) -> None:
    assert lines(sandbox, sys.executable, "-c", KERNEL, SLURM_JOB_NUM_NODES="2") == [
        "kcoord: each node compiled for itself: set KCOORD_STORE to a directory that all nodes share"
    ]


def test_nodes_with_different_stores(sandbox: Sandbox) -> None:
    kernels = KERNEL.replace("; kcoord", "\nfor n in '123': kcoord").replace("'k'),", "'k', n=n),")
    with RedisServer(tcp=True) as redis:
        said = [
            lines(sandbox, sys.executable, "-c", kernels, KCOORD_REDIS_URL=redis.url, KCOORD_STORE=str(sandbox.root / node),
                  KCOORD_LOCAL_DIR=str(sandbox.root / f"local-{node}"))
            for node in ("one", "two")
        ]  # fmt: skip
    assert said == [
        [],
        [
            f"kcoord: the store {sandbox.root}/two lacks kernels that other nodes have published: they were removed, or "
            "these nodes have another store: set the same KCOORD_STORE on all nodes, or a KCOORD_NAMESPACE for each store"
        ],
    ]


COMPILES_LATE = """
import time
import kcoord
def get(name, seconds):
    def compile(staging):
        time.sleep(seconds)
        (staging / "kernel").write_text(name)
    kcoord.connect().get_or_compile(kcoord.CacheKey.of("test", name), compile)
get("first", 0)
time.sleep(21)
get("late", 12)
"""


@pytest.mark.serial
def test_a_rank_that_compiles_in_the_middle_of_a_job(sandbox: Sandbox) -> None:
    (said,) = lines(sandbox, sys.executable, "-c", COMPILES_LATE, RANK="3")
    assert re.fullmatch(
        r"kcoord: \S+ \(rank 3, pid \d+\) compiles test:late since 1\d s, 2\d s after the last kernel: "
        "other ranks may be waiting for it in a collective",
        said,
    ), said


@pytest.fixture
def without_kcoord(sandbox: Sandbox) -> Path:
    """A Python of its own, that has Triton and nothing else."""
    import triton

    place = sandbox.root / "other"
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for path in Path(triton.__file__).parents[1].glob("triton*"):
        (packages / path.name).symlink_to(path)
    return place / "bin" / "python"


FOREIGN = PROGRAMS / "foreign.py"


def test_a_python_without_kcoord_runs_as_without_it_and_is_told(sandbox: Sandbox, without_kcoord: Path) -> None:
    """Triton would end the job if it were told to import a module that is not there."""
    given = {"PYTHONPATH": None, "TRITON_CACHE_DIR": str(sandbox.root / "triton")}
    said = lines(sandbox, str(without_kcoord), str(FOREIGN), **given)
    assert said == [
        f"kcoord: {without_kcoord} has no kcoord, so its kernels are not shared: pip install kcoord there, or use another Python"
    ]
    assert lines(sandbox, "bash", "-c", f"{without_kcoord} {FOREIGN}", **given) == [], "nobody knows what a shell runs"


@pytest.mark.parametrize("first", ["#!/bin/bash -c 'a quote", "#!", "#! /usr/bin/env", "#!/usr/bin/env python3"])
def test_a_program_whose_first_line_names_no_python_that_is_known(tmp_path: Path, first: str) -> None:
    """It is for the kernel to judge the line."""
    program = tmp_path / "program"
    program.write_text(f"{first}\n")
    program.chmod(0o755)
    found = interpreter_of([str(program)])
    assert (found != "") == first.endswith("python3")


def test_what_a_shell_runs_is_hooked_once_it_imports_torch(sandbox: Sandbox) -> None:
    pytest.importorskip("torch")
    command = f"{sys.executable} -c 'import torch, runpy; runpy.run_path(\"{FOREIGN}\")'"
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", "bash", "-c", command)
    assert "kcoord: 1 kernel: 1 compiled" in done.stderr


def test_a_metrics_address_of_another_host_and_one_that_is_taken(sandbox: Sandbox) -> None:
    (said,) = lines(sandbox, "true", KCOORD_METRICS="203.0.113.4:9100")
    assert said.startswith("kcoord: no metrics: cannot listen at KCOORD_METRICS=203.0.113.4:9100: ")
    assert said.endswith("Cannot assign requested address: it must be an address of this host; everything else goes on")
    with socket.create_server(("127.0.0.1", port := reserve_port())):
        (said,) = lines(sandbox, "true", KCOORD_METRICS=f"127.0.0.1:{port}")
    assert said.endswith(f"127.0.0.1:{port}: another program, perhaps an agent, has it; everything else goes on")


STARTED = (
    "kcoord: KCOORD_STORE is set, but this job was started without kcoord: use kcoord-torchrun, kcoord exec, or kcoord.install() "
    "in the script\n"
)


@pytest.mark.parametrize(
    ("program", "environment", "said"),
    [
        ("import torch, triton", {}, STARTED),
        ("import torch, triton", {"LOCAL_RANK": "1"}, ""),
        ("import torch, triton", {"KCOORD_DISABLE": "1"}, ""),
        ("import torch, triton, kcoord; kcoord.install()", {}, ""),
        ("import torch", {}, ""),
    ],
    ids=["compiles", "is not the first rank", "is not to use it", "installs kcoord", "compiles nothing"],
)
def test_a_store_in_a_job_that_was_started_without_kcoord(
    sandbox: Sandbox, program: str, environment: dict[str, str], said: str
) -> None:
    pytest.importorskip("triton")
    done = sandbox.run("-c", program, KCOORD_STORE=str(sandbox.root / "store"), **environment)
    assert (done.returncode, done.stderr) == (0, said)
