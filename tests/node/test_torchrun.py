"""kcoord-torchrun is torchrun: its arguments, exit codes and signals, with kcoord beside it."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from kcoord_launch.arguments import add_flags, early_arguments
from tests.support.living import agents_of
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish

pytest.importorskip("torch")

LAUNCH = ("-m", "kcoord_launch.torchrun", "--standalone")


def witnesses(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_help_is_torchruns_and_names_kcoords_flags(sandbox: Sandbox) -> None:
    done = sandbox.run_forked(*LAUNCH, "--help")
    assert done.returncode == 0
    for flag in ("--nproc-per-node", "--rdzv-backend", "--max-restarts", "--kcoord-store", "--kcoord-redis-url"):
        assert flag in done.stdout.replace("_", "-")


def test_it_says_its_version_and_torchs(sandbox: Sandbox) -> None:
    import torch

    import kcoord

    said = sandbox.run_forked(*LAUNCH, "--version").stdout
    assert said == f"kcoord {kcoord.__version__}, torch {torch.__version__}\n"


COMMANDS = [
    "train.py",
    "--standalone --nproc-per-node 4 train.py --nnodes 3 --kcoord-store elsewhere",
    "--nproc_per_node=gpu --nnodes=1:4 --rdzv_backend=c10d --rdzv-id=7 --rdzv-endpoint=host:1 -m train.it -m",
    "--node-rank 3 --master-addr host --master-port 1 -r 3 -t 0:1 --log-dir logs --no-python ./train --nproc-per-node 2",
    "--max-restarts=3 --run-path --role=r --kcoord-redis-url redis://host train.py",
]
NEEDED = (
    "nnodes", "nproc_per_node", "node_rank", "rdzv_backend", "rdzv_id", "module", "no_python", "run_path", "training_script",
    "training_script_args", "kcoord_store", "kcoord_redis_url",
)  # fmt: skip


@pytest.mark.parametrize("environment", [{}, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1"}])
@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_are_read_as_torchrun_reads_them(
    command: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    add_flags(parser := get_args_parser())
    early, late = early_arguments(command.split()), parser.parse_args(command.split())
    assert early is not None
    assert {name: getattr(early, name) for name in NEEDED} == {name: getattr(late, name) for name in NEEDED}


@pytest.mark.parametrize(
    "command",
    [
        "",
        "--help",
        "--of-a-newer-torch 3 train.py",
        "--node-rank x train.py",
        "--nnodes",
        "--max-restarts often train.py",
    ],
)
def test_arguments_that_are_not_known_are_left_to_torchrun(command: str) -> None:
    assert early_arguments(command.split()) is None


WAITS = """
import os, time
until = time.monotonic() + 60
while not any(name.endswith(".sock") for name in os.listdir(os.environ["KCOORD_LOCAL_DIR"])):
    assert time.monotonic() < until
    time.sleep(0.01)
raise SystemExit("there is an agent")
"""


def test_the_agent_starts_while_torch_is_imported(sandbox: Sandbox) -> None:
    torch = sandbox.root / "torch"
    (torch / "distributed").mkdir(parents=True)
    for name, text in {"__init__.py": "", "distributed/__init__.py": "", "distributed/run.py": WAITS}.items():
        (torch / name).write_text(text)
    path = os.pathsep.join([str(sandbox.root), os.environ.get("PYTHONPATH", "")])
    done = sandbox.run(*LAUNCH, "train.py", PYTHONPATH=path, KCOORD_LOCAL_DIR=str(sandbox.local))
    assert "there is an agent" in done.stderr
    assert not sandbox.processes()


@pytest.mark.smoke
def test_ranks_compile_each_kernel_once_and_a_line_sums_it_up(sandbox: Sandbox) -> None:
    done = sandbox.run_torchrun(*LAUNCH, "--nproc-per-node=4", PROGRAMS / "rank.py", "--kernels", "5")
    assert done.returncode == 0, done.stderr
    assert sum(len(w["compiled"]) for w in witnesses(done.stdout)) == 5
    (line,) = re.findall(r"^kcoord: .*$", done.stderr, re.MULTILINE)
    assert re.search(
        r"kcoord: 5 kernels: 5 compiled, 15 loaded \([\d.]+ s saved\); all ready [\d.]+ s after launch; kcoord report ",
        line,
    )
    assert not sandbox.processes(), "the agent ends with its job"
    assert not list(sandbox.local.glob("*.sock"))


def test_nobody_reading_stderr_is_no_failure(sandbox: Sandbox) -> None:
    script = sandbox.root / "script.py"
    script.write_text("")
    job = sandbox.start(*LAUNCH, "--nproc-per-node=1", script)
    assert job.stderr is not None
    job.stderr.close()
    job.stderr = None
    assert finish(job, 60).returncode == 0


def test_without_an_agent_the_job_runs_as_without_kcoord(sandbox: Sandbox) -> None:
    secrets = {"KCOORD_REDIS_URL": "redis://:hunter2@127.0.0.1:1/0", "KCOORD_SOCKET": "/proc/nowhere/agent.sock"}
    done = sandbox.run_torchrun(*LAUNCH, "--nproc-per-node=1", PROGRAMS / "rank.py", "--kernels", "1", **secrets)
    assert done.returncode == 0, done.stderr
    (rank,) = witnesses(done.stdout)
    assert rank["password"] is None
    assert not list(sandbox.local.glob("**/*.cubin"))
    assert "runs without kcoord" in done.stderr
    assert not sandbox.processes()


def test_no_python_runs_any_program_with_its_compilers_hooked(sandbox: Sandbox) -> None:
    done = sandbox.run_forked(*LAUNCH, "--no-python", "--nproc-per-node=2", "env")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("_KCOORD_HOOK=1") == 2


def test_pet_variables_are_honoured(sandbox: Sandbox) -> None:
    done = sandbox.run_forked(*LAUNCH, "--no-python", "printenv", "RANK", PET_NPROC_PER_NODE="3")
    assert sorted(done.stdout.split()) == ["0", "1", "2"]


def test_the_exit_code_is_torchruns(sandbox: Sandbox) -> None:
    script = sandbox.root / "fails.py"
    script.write_text("raise SystemExit(7)")
    done = sandbox.run_forked(*LAUNCH, "--nproc-per-node=2", script)
    plain = sandbox.run_forked("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)
    assert done.returncode == plain.returncode != 0
    assert "ChildFailedError" in done.stderr
    assert f"{script} FAILED" in done.stderr
    assert not sandbox.processes()


def test_sigterm_ends_the_job_and_leaves_nothing(sandbox: Sandbox) -> None:
    """SIGINT and SIGHUP: `tests/faults/test_launcher.py`."""
    script = sandbox.root / "sleeps.py"
    script.write_text("import os, pathlib, time; pathlib.Path('up' + os.environ['RANK']).touch(); time.sleep(600)")
    job = sandbox.fork(*LAUNCH, "--nproc-per-node=2", script)
    eventually(lambda: len(list(sandbox.root.glob("up*"))) == 2 or job.poll() is not None, 60)
    job.send_signal(signal.SIGTERM)
    done = finish(job, 60)
    assert done.returncode != 0
    eventually(lambda: not sandbox.processes())


def test_disabled_leaves_no_trace(sandbox: Sandbox) -> None:
    environment = {"KCOORD_DISABLE": "1", "TRITON_CACHE_DIR": str(sandbox.root / "stock")}
    done = sandbox.run_forked(*LAUNCH, "--nproc-per-node=2", PROGRAMS / "rank.py", "--kernels", "1", **environment)
    assert done.returncode == 0, done.stderr
    assert sandbox.is_untouched
    assert not list((sandbox.root / "stock").glob("*/kcoord-*"))
    assert [(w["redis"], w["kcoord"]) for w in witnesses(done.stdout)] == [(False, False)] * 2
    assert "kcoord" not in done.stderr


def test_an_agent_killed_in_mid_job_is_replaced_and_the_job_ends_well(sandbox: Sandbox) -> None:
    begun = sandbox.root / "begun"
    program = (PROGRAMS / "rank.py", "--kernels", "6", "--slow", "0.3", "--compiling", str(begun))
    job = sandbox.fork_torchrun(*LAUNCH, "--nproc-per-node=3", *program)
    eventually(lambda: begun.exists() or job.poll() is not None, 60)
    (agent,) = agents_of(sandbox.processes())
    agent.kill()
    done = finish(job)
    assert done.returncode == 0, done.stderr
    ranks = witnesses(done.stdout)
    assert [r["cubins"] == ranks[0]["cubins"] for r in ranks] == [True] * 3
    assert 6 <= sum(len(r["compiled"]) for r in ranks) <= 6 + 3, "what was under way may be compiled twice"
    assert "restarted" in done.stderr
    homes = {cubin.parent for cubin in sandbox.local.glob("triton/*/*.cubin")}
    assert len(homes) == 6
    assert all((home / "kcoord-manifest.msgpack").exists() for home in homes)


def test_a_rendezvous_id_of_any_form_names_the_job() -> None:
    from kcoord.settings import Settings
    from kcoord_launch.environment import job_name

    name = job_name(Settings(), "x" * 1000 + "\n")
    assert Settings.from_environ({"KCOORD_JOB": name}).job == name, "the ranks accept it"
    assert "\n" not in job_name(Settings(), "a\nb")
