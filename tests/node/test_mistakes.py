"""Mistakes, and the one line that names the cause and the remedy."""

from __future__ import annotations

import re
import shlex
import socket
import sys
import venv
from pathlib import Path

import pytest

from kcoord_launch.interpreter import interpreter_of
from tests.support.command import KCOORD, kcoord
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


def test_a_job_whose_compiles_all_fail_is_not_ready(sandbox: Sandbox) -> None:
    program = KERNEL.replace("(s / 'k').write_text('k')", "1 / 0")
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, "-c", program)
    assert done.returncode == 1
    failed, last = done.stderr.splitlines()[-2:]
    assert failed == "kcoord: 1 compile failed"
    assert last.startswith("kcoord: 1 kernel: 0 compiled, 0 loaded (0.0 s saved); kcoord report ")


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
        ("import torch", {}, ""),
    ],
    ids=["compiles", "is not the first rank", "compiles nothing"],
)
def test_a_store_in_a_job_that_was_started_without_kcoord(
    sandbox: Sandbox, program: str, environment: dict[str, str], said: str
) -> None:
    pytest.importorskip("triton")
    done = sandbox.run("-c", program, KCOORD_STORE=str(sandbox.root / "store"), **environment)
    assert (done.returncode, done.stderr) == (0, said)


# Commands: {here} is a directory with an empty file `file`, a pack `all.kcb` of nothing and a key `key`.

URL = "it must look like redis://[user:password@]host:port/0, rediss://…, unix:///path or redis+sentinel://host:port,host:port/service"
UNREADABLE = (
    "it cannot be parsed: a port is a number from 1 to 65535; in a password, write / ? # @ : as %2F %3F %23 %40 %3A"
)
SIZE = "it must be a size such as 50GiB, 800MB or 123456 (bytes)"
SECONDS = "it must be a positive number of seconds, such as 15 or 0.5"

COMMANDS = {
    "repot": (2, "No such command 'repot'. Did you mean report or export? (kcoord --help)"),
    "ls --jsn": (2, "No such option '--jsn'. Did you mean '--json'? (kcoord ls --help)"),
    "keys nw file": (2, "No such command 'nw'. Did you mean 'new'? (kcoord keys --help)"),
    "--store /shared ls": (
        2, "kcoord has no --store: set KCOORD_STORE, or give it after the command's name (kcoord --help)",
    ),
    "exec --disable 1 -- true": (2, "kcoord exec has no --disable: set KCOORD_DISABLE (kcoord exec --help)"),
    "stats yesterday": (2, "Got unexpected extra argument (yesterday) (kcoord stats --help)"),
    "stats --job yesterday": (1, "nothing is known here of job 'yesterday'; jobs of the last week: none"),
    "report yesterday": (
        1, "there is no time line of job 'yesterday': no job has left one on this node, and KCOORD_STORE (--store) is not set",
    ),
    "report job --json -o -": (2, "--json and '-o -' both want stdout: give -o a file (kcoord report --help)"),
    "status": (
        1, "no agent answers at {here}/local/agent.sock: No such file or directory; a job or 'kcoord agent' starts one",
    ),
    "agent --stop --check": (
        2, "--stop, --check, --await and --sidecar are four commands: give one of them (kcoord agent --help)",
    ),
    "explain c9d10e01": (1, "no artifact has the key 'c9d10e01': 'kcoord ls' lists them"),
    "explain a b --files": (2, "--files is about one KEY (kcoord explain --help)"),
    "gc --max-size 50GX --local": (2, f"Invalid value for '--max-size': '50GX': {SIZE} (kcoord gc --help)"),
    "gc --unused-for 30 --local": (
        2, "Invalid value for '--unused-for': '30': it must be a time such as 30d, 12h, 15min or 45s (kcoord gc --help)",
    ),
    "gc --key c9d1": (
        2, "Invalid value for '--key': 'c9d1': give at least the key's first 12 digits, as 'kcoord ls' shows them "
        "(kcoord gc --help)",
    ),
    "gc --key c9d10e01e0db": (1, "nothing here has the key c9d10e01e0db: 'kcoord ls' lists keys"),
    "gc --compiler triton=3.7.1": (
        2, "Invalid value for '--compiler': 'triton=3.7.1': give NAME==RELEASE, such as gcc==12.2.0, triton==3.7.1 "
        "(kcoord gc --help)",
    ),
    "gc --pin job --local": (
        2, "--pin, --unpin and --pins are of the store, remove nothing, and are no dry run: give them alone (kcoord gc --help)",
    ),
    "gc": (2, "KCOORD_STORE is not set: set it, or give --store; --local is for this node's own copies"),
    "gc --store {here}/store --unpin job": (1, "the profile 'job' is not pinned: 'kcoord gc --pins' lists those that are"),
    "gc --local --local-dir {here}/nowhere": (
        1, "{here}/nowhere: there is nothing on this node: set KCOORD_LOCAL_DIR to the directory of its jobs",
    ),
    "store init --store {here}/file": (
        1, "{here}/file: a part of its path is a file, or a link inside the store: name a directory",
    ),
    "verify --store {here}/file": (1, "{here}/file: it is a file: name a directory in KCOORD_STORE"),
    "export --store {here}/store out": (
        2, "nothing to export: give the NAME of a profile, or --all (kcoord export --help)",
    ),
    "export --store {here}/store job --all out": (2, "--all has every profile: leave the NAME out (kcoord export --help)"),
    "export --store {here}/store job out": (1, "there is no profile 'job': there are none yet (KCOORD_PROFILE records one)"),
    "import --store {here}/store nowhere": (
        2, "Invalid value for 'FILE': File 'nowhere' does not exist (kcoord import --help)",
    ),
    "import --store {here}/store {here}/file": (
        1, "{here}/file: it is no file of 'kcoord export', or another version's: export it again",
    ),
    "import --store {here}/store {here}/cut": (1, "{here}/cut: it was cut, or has a huge index: copy it again"),
    "warmup job": (1, "there is no profile 'job': there are none yet (KCOORD_PROFILE records one)"),
    "warmup job --target sm_90": (
        2, "Invalid value for '--target': 'sm_90': 'sm_90' is no target: write cuda:90, cuda:90a or hip:gfx942 "
        "(kcoord warmup --help)",
    ),
    "toolchain --store /shared ls": (
        2, "kcoord toolchain has no --store: set KCOORD_STORE, or give it after the command's name (kcoord toolchain --help)",
    ),
    "toolchain name gcc mine --store {here}/store": (
        1, "{here}/store: no toolchain has the name gcc: 'kcoord toolchain ls' lists them",
    ),
    "keys new {here}/key": (
        1, "{here}/key is there: name another file, or add a key to it with 'kcoord keys rotate {here}/key'",
    ),
    "keys new {here}/nowhere/key": (1, "{here}/nowhere: it is missing: create it, or mount it"),
    "keys rotate {here}/nowhere": (2, "{here}/nowhere: No such file or directory: name a file that this user may read"),
    "keys rotate {here}/key.pub": (1, "{here}/key.pub: its keys only verify: rotate the file that signs"),
    "cc -c kernel.cpp": (127, "-c: no such program; put the compiler after --"),
    "exec": (2, "Missing argument '-- COMMAND [ARGS]…' (kcoord exec --help)"),
    "exec -- trian.py": (127, "trian.py: no such program: check its name and PATH"),
    "exec -- {here}/file": (
        126, "{here}/file: it is not executable: chmod +x it, or name its interpreter, as in python {here}/file",
    ),
    "exec -- 'python train.py'": (127, "python train.py: no such program: give its words without quotes"),
    "exec --store -- true": (2, "--store='--': its value is missing"),
    "exec --lease-ttl 15s -- true": (2, f"--lease-ttl='15s': {SECONDS}"),
    "exec --max-wait -1 -- true": (2, f"--max-wait='-1': {SECONDS}"),
    "exec --hedge 0.5 -- true": (2, "--hedge='0.5': it must be a number of at least 1, such as 4, or 0"),
    "exec --lease-ttl 1000 -- true": (
        2, "KCOORD_LEASE_LIMIT=900 is below KCOORD_LEASE_TTL=1000: raise the limit or lower the TTL",
    ),
    "exec --store-unused-for 1d -- true": (
        2, "--store-unused-for='1d': it must be a time such as 30d, at least 2d: a use may be known a day late",
    ),
    "exec --namespace team/a -- true": (2, "--namespace='team/a': it must be 1 to 64 letters, digits, '-', '_' or '.'"),
    "exec --metrics localhost -- true": (
        2, "--metrics='localhost': it must be a port, as 9464, or host:port, as 0.0.0.0:9464 for all of this node's addresses",
    ),
    "exec --trust require -- true": (
        2, "KCOORD_TRUST=require needs a signing key: set KCOORD_SIGNING_KEY_FILE (make one with: kcoord keys new FILE), or "
        "KCOORD_TRUST=off",
    ),
    "exec --signing-key-file {here}/nowhere -- true": (
        2, "KCOORD_SIGNING_KEY_FILE={here}/nowhere: No such file or directory: name a file that this user may read",
    ),
    "exec --signing-key-file {here}/file -- true": (
        2, "KCOORD_SIGNING_KEY_FILE={here}/file: others may read or write it: chmod 600 (of a Kubernetes Secret: defaultMode: "
        "0440)",
    ),
    "exec --redis-url localhost:6379 -- true": (2, f"--redis-url=***: {URL}"),
    "exec --redis-url redis://host:70000 -- true": (2, f"--redis-url=redis://***: {UNREADABLE}"),
    "exec --redis-url 'redis://:pass word@host' -- true": (
        2, "--redis-url=redis://***: it holds white space: in a password, write a space as %20",
    ),
    "exec --redis-url redis://host/kernels -- true": (
        2, "--redis-url=redis://***: after the host it must have the number of a database, as in redis://host:6379/0",
    ),
    "exec --redis-url unix:// -- true": (2, "--redis-url=unix://***: it names no socket: unix:///path"),
    "exec --redis-url redis+sentinel://host -- true": (
        2, "--redis-url=redis+sentinel://***: it names no service: redis+sentinel://host:26379,host:26379/service/0",
    ),
}  # fmt: skip
"""The exit code and the one line."""


@pytest.fixture
def here(sandbox: Sandbox) -> Path:
    for arguments in (["store", "init"], ["export", "--all", "all.kcb"], ["keys", "new", "key"]):
        kcoord(sandbox, *arguments, KCOORD_STORE=str(sandbox.root / "store"))
    (sandbox.root / "file").touch(0o644)
    (sandbox.root / "cut").write_bytes((sandbox.root / "all.kcb").read_bytes()[:-1])
    return sandbox.root


@pytest.mark.parametrize("several", [list(COMMANDS)[at::6] for at in range(6)], ids=range(6))
def test_a_command(sandbox: Sandbox, here: Path, several: list[str]) -> None:
    """One sandbox for some commands, none of which leaves anything: to make one costs more than they do."""
    for typed in several:
        code, line = COMMANDS[typed]
        arguments = shlex.split(typed.replace("{here}", str(here)))
        socket = str(sandbox.local / "agent.sock")
        done = sandbox.run_kcoord(*KCOORD, *arguments, KCOORD_SOCKET=socket)
        said = f"kcoord: {line.replace('{here}', str(here))}\n"
        assert (done.returncode, done.stdout, done.stderr) == (code, "", said), typed


# Jobs: they go on as without kcoord, with one line.

JOBS = {
    "a store that is a file": (
        {"KCOORD_STORE": "{here}/file", "KCOORD_STORE_CREATE": "0"},
        "the store cannot be used: {here}/file: it is a file: name a directory in KCOORD_STORE; training goes on, and artifacts "
        "stay on this node",
    ),
    "a local directory that is a file": (
        {"KCOORD_LOCAL_DIR": "{here}/file"},
        "KCOORD_LOCAL_DIR={here}/file: it is a file: name a directory; the job runs without kcoord",
    ),
    "a local directory that is the root": (
        {"KCOORD_LOCAL_DIR": "/"},
        "KCOORD_LOCAL_DIR=/: it is the root of the file system: set KCOORD_LOCAL_DIR to a directory of your own; the job runs "
        "without kcoord",
    ),
    "a store in the local directory": (
        {"KCOORD_LOCAL_DIR": "{here}/here", "KCOORD_STORE": "{here}/here/store", "KCOORD_STORE_CREATE": "1"},
        "KCOORD_STORE={here}/here/store is in KCOORD_LOCAL_DIR, which is for this node and user alone: name a directory that "
        "all nodes share",
    ),
    "a local directory of the kernel's": (
        {"KCOORD_LOCAL_DIR": "/proc/kcoord"},
        "KCOORD_LOCAL_DIR=/proc/kcoord: it is missing: create it, or mount it; the job runs without kcoord",
    ),
    "a local directory for everybody": (
        {"KCOORD_LOCAL_DIR": "{here}/open"},
        "KCOORD_LOCAL_DIR={here}/open: everybody may write to it: empty it and chmod go-w, or set KCOORD_LOCAL_DIR to a "
        "directory of your own; the job runs without kcoord",
    ),
    "a local directory behind a link": (
        {"KCOORD_LOCAL_DIR": "{here}/link"},
        "KCOORD_LOCAL_DIR={here}/link: it is a symbolic link: set KCOORD_LOCAL_DIR to a directory of your own; the job runs "
        "without kcoord",
    ),
    "a socket that is a file": (
        {"KCOORD_SOCKET": "{here}/file"},
        "KCOORD_SOCKET={here}/file: it is a file, and no socket: name another one, or remove it; the job runs without kcoord",
    ),
    "an agent that nobody starts": (
        {"KCOORD_SPAWN": "0", "KCOORD_SOCKET": "{here}/none.sock", "KCOORD_AGENT_TIMEOUT": "0.1"},
        "no agent answers at {here}/none.sock: No such file or directory; none is started (KCOORD_SPAWN=0), and ranks compile "
        "for themselves until there is one",
    ),
    "a setting that there is not": (
        {"KCOORD_STROE": "/shared"},
        "there is no setting KCOORD_STROE: is KCOORD_STORE meant?",
    ),
    "keys that only verify": (
        {"KCOORD_STORE": "{here}/store", "KCOORD_SIGNING_KEY_FILE": "{here}/key.pub"},
        "the store {here}/store is only read: its signing keys only verify: give this node one that signs, or let others "
        "publish; its artifacts are used, and this node's stay here",
    ),
    "Redis without a store": (
        {"KCOORD_REDIS_URL_FILE": "{here}/url"},
        "KCOORD_REDIS_URL_FILE is set but there is no store that artifacts could travel through: set KCOORD_STORE to a shared "
        "directory; until then each node coordinates itself",
    ),
    "an option of Redis that there is not": (
        {"KCOORD_REDIS_URL_FILE": "{here}/url", "KCOORD_STORE": "{here}/store"},
        "Redis cannot be used: KCOORD_REDIS_URL_FILE has an option that redis-py refuses: there is no timeout",
    ),
    "Redis where nobody listens": (
        {"KCOORD_REDIS_URL_FILE": "{here}/nobody", "KCOORD_STORE": "{here}/store"},
        "Redis cannot be used (localhost:1: nothing listens there: start Redis, or check KCOORD_REDIS_URL_FILE); until it is "
        "back, coordination is by lease files",
    ),
    "kcoord off, and settings that mean nothing": (
        {"KCOORD_DISABLE": "1", "KCOORD_STORE": "shared", "KCOORD_LEASE_TTL": "1000", "KCOORD_REDIS_URL": "localhost"},
        "",
    ),
}


@pytest.mark.parametrize("mistake", JOBS)
def test_a_job(sandbox: Sandbox, here: Path, mistake: str) -> None:
    (here / "open").mkdir()
    (here / "open").chmod(0o777)
    (here / "link").symlink_to(here / "open")
    (here / "url").write_text("redis://localhost:1?timeout=3")
    (here / "nobody").write_text("redis://localhost:1")
    for url in ("url", "nobody"):
        (here / url).chmod(0o600)
    environment, line = JOBS[mistake]
    given = {name: value.replace("{here}", str(here)) for name, value in environment.items()}
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, "-c", f"print(3); {KERNEL}", **given)
    assert (done.returncode, done.stdout) == (0, "3\n")
    said = [said for said in done.stderr.splitlines() if " compiled, " not in said]
    assert said[:1] == ([f"kcoord: {line.replace('{here}', str(here))}"] if line else [])
    assert len(said) <= 1 or "KCOORD_SPAWN" in environment, "where there is no agent each rank says so"


def test_a_store_from_before_the_keys_is_no_other_store(sandbox: Sandbox, here: Path) -> None:
    """Kernels that are there and not signed are named as such, and as nothing else."""
    kernels = KERNEL.replace("; kcoord", "\nfor n in '1234': kcoord").replace("'k'),", "'k', n=n),")
    store = {"KCOORD_STORE": str(here / "store"), "KCOORD_PROFILE": "old"}
    assert lines(sandbox, sys.executable, "-c", kernels, **store) == []
    signs = {**store, "KCOORD_SIGNING_KEY_FILE": str(here / "key")}
    said = lines(sandbox, sys.executable, "-c", kernels, KCOORD_LOCAL_DIR=str(here / "other"), **signs)
    assert said
    assert all(": it is not signed: " in line for line in said)


def test_what_others_have_signed_or_nobody(sandbox: Sandbox, here: Path) -> None:
    """It is whole, and no bad one; a name that two have is no key."""
    keys = {name: str(here / name) for name in ("key", "other")}
    kcoord(sandbox, "keys", "new", keys["other"])
    store = {"KCOORD_STORE": str(here / "store")}
    two = KERNEL.replace("; kcoord", "\nfor n in '12': kcoord").replace("'k'),", "'k', n=n),")
    for signs, fault in (
        ({}, "it is not signed: let every node that publishes have the key"),
        ({"KCOORD_SIGNING_KEY_FILE": keys["other"]}, "add that key to KCOORD_SIGNING_KEY_FILE on this node"),
    ):
        assert lines(sandbox, sys.executable, "-c", two, **store, **signs)[1:] == []
        done = kcoord(sandbox, "verify", code=1, KCOORD_SIGNING_KEY_FILE=keys["key"], **store)
        assert done.stdout.startswith("0 artifacts verified, 0 bad, 2 not signed by a key that is known here, ")
        each = done.stderr.splitlines()
        assert len(each) == 2
        assert all(line.startswith(f"not trusted: {here}/store/") and line.endswith(fault) for line in each)
    assert re.fullmatch(
        r"kcoord: 2 artifacts match 'k': name one of \w{12}, \w{12}\n",
        kcoord(sandbox, "explain", "k", code=1, **store).stderr,
    )
    assert "\n0 artifacts, 0 bytes, 0.0 s of compiling, in " in kcoord(sandbox, "ls", "matmul", **store).stdout


TORCHRUN = {
    "": (2, "the following arguments are required: training_script, training_script_args (kcoord-torchrun --help)"),
    "--store /shared train.py": (
        2, "unrecognized arguments: --store; did you mean --kcoord-store? (kcoord-torchrun --help)",
    ),
    "--kcoord-disable 1 train.py": (
        2, "unrecognized arguments: --kcoord-disable; did you mean KCOORD_DISABLE=? (kcoord-torchrun --help)",
    ),
    "--kcoord-stor /shared train.py": (
        2, "ambiguous option: --kcoord-stor could match --kcoord-store, --kcoord-store-create, --kcoord-store-max-size, "
        "--kcoord-store-max-files, --kcoord-store-unused-for (kcoord-torchrun --help)",
    ),
    "--nporc-per-node=2 train.py": (
        2, "unrecognized arguments: --nporc-per-node=2; did you mean --nproc-per-node? (kcoord-torchrun --help)",
    ),
    "--kcoord-max-wait 5min train.py": (2, f"--kcoord-max-wait='5min': {SECONDS}"),
}  # fmt: skip


@pytest.mark.parametrize("arguments", TORCHRUN)
def test_torchrun(sandbox: Sandbox, arguments: str) -> None:
    pytest.importorskip("torch")
    code, line = TORCHRUN[arguments]
    done = sandbox.run_torchrun("-m", "kcoord_launch.torchrun", *arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"kcoord: {line}\n")


def test_torchrun_without_its_script_says_what_python_says(sandbox: Sandbox) -> None:
    """The rest is torchrun's own report, as without kcoord."""
    pytest.importorskip("torch")
    done = sandbox.run("-m", "kcoord_launch.torchrun", "--standalone", "trian.py")
    assert done.returncode == 1
    assert f"can't open file '{sandbox.root}/trian.py': [Errno 2] No such file or directory" in done.stderr


# The Python interface: the last line of the traceback.

BUILD = "import kcoord\n@kcoord.compile_once({})\ndef build(n, {}): {}\nbuild({})"
WRITES = "(staging / 'k').write_text('k')"
CALLS = {
    "a function of the coordinator's": (
        "import kcoord; kcoord.get_or_compile('key')",
        "AttributeError: module 'kcoord' has no attribute 'get_or_compile': call kcoord.connect().get_or_compile(…)",
    ),
    "a text for a key": (
        "import kcoord; kcoord.connect().get_or_compile('key', print)",
        "KeyFactorError: the key 'key' is no CacheKey: make one with kcoord.CacheKey.of(compiler, name, …)",
    ),
    "a list of no recipes": (
        "import kcoord; kcoord.warmup([1])",
        "TypeError: 1 is no recipe: give a profile's name, recipes, or (function, (argument, …)) pairs",
    ),
    "nothing for recipes": (
        "import kcoord; kcoord.warmup(None)",
        "TypeError: None is no recipe: give a profile's name, recipes, or (function, (argument, …)) pairs",
    ),
    "no staging": (
        BUILD.format("", "other=1", "pass", "1"),
        "KeyFactorError: build needs a keyword parameter 'staging': def …(…, *, staging)",
    ),
    "a value without identity": (
        BUILD.format("", "*, staging", WRITES, "open('/dev/null')"),
        "KeyFactorError: arguments.n: a value of type _io.TextIOWrapper has no identity that is stable across processes: give "
        "its class a __cache_signature__() that returns the plain values that matter; for a class that is not yours, "
        'kcoord.register_signature("_io.TextIOWrapper", function)',
    ),
    "a scope's name": (
        BUILD.format("scope='device'", "*, staging", WRITES, "1"),
        "KeyFactorError: scope='device': it must be kcoord.Scope.TARGET, MODEL or DEVICE",
    ),
    "an argument that there is not": (
        BUILD.format("dynamic=['m']", "*, staging", WRITES, "1"),
        "KeyFactorError: dynamic='m' is no argument: there are n",
    ),
    "no file": (
        BUILD.format("", "*, staging", "pass", "1"),
        "ArtifactInvalid: build: its compile wrote no file into its staging directory",
    ),
}


@pytest.mark.parametrize("mistake", CALLS)
def test_a_call(sandbox: Sandbox, mistake: str) -> None:
    program, line = CALLS[mistake]
    (sandbox.root / "program.py").write_text(program)
    done = sandbox.run("program.py", KCOORD_SPAWN="0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].removeprefix("kcoord.errors.") == line


def test_installed_twice_and_after_triton(sandbox: Sandbox) -> None:
    pytest.importorskip("triton")
    done = sandbox.run("-c", "import kcoord; kcoord.install(); kcoord.install(); import triton; kcoord.install()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_fault_of_a_program_is_not_told_to_the_next_one(sandbox: Sandbox) -> None:
    (sandbox.root / "program.py").write_text(CALLS["no file"][0])
    for _ in range(2):
        assert sandbox.run("program.py").stderr.count("kcoord: not published: build: ") == 1
    assert kcoord(sandbox, "agent", "--stop").stderr == ""


def test_kernels_of_the_script_itself_are_not_compiled_ahead(sandbox: Sandbox) -> None:
    pytest.importorskip("triton")
    kcoord(sandbox, "exec", "--profile", "own", "--", sys.executable, str(FOREIGN))
    done = kcoord(sandbox, "warmup", "own", code=1)
    skipped, last = done.stderr.splitlines()
    assert skipped.endswith(
        "stands in the job's script, which this process does not know: move it into a module that the script imports"
    )
    assert last == "kcoord: no key could be compiled: see above"
