"""The kcoord command, as a user types it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kcoord.artifacts.store_root import NO_STORE
from kcoord.cli import _COMMANDS
from tests.support.command import DOCTOR, KCOORD, as_json, findings, kcoord
from tests.support.mounts import read_only, tmpfs
from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS, Sandbox, Started, eventually, finish
from tests.support.waiting import pause

RANK = PROGRAMS / "generic_rank.py"


@pytest.fixture
def agent(sandbox: Sandbox) -> Iterator[Started]:
    process = sandbox.fork_kcoord(*KCOORD, "agent")
    eventually(lambda: list(sandbox.local.glob("*.sock")) or process.poll() is not None)
    sandbox.run_kcoord(*KCOORD, "status", "--json")  # it answers once it serves, and minds signals
    yield process
    if process.poll() is None:
        process.terminate()
        finish(process)


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_explains_itself(sandbox: Sandbox, name: str) -> None:
    assert "Usage: kcoord" in kcoord(sandbox, name, "--help").stdout
    assert name in kcoord(sandbox, "--help").stdout


def test_no_description_is_cut_off(sandbox: Sandbox) -> None:
    assert "..." not in kcoord(sandbox, "--help").stdout.partition("Commands:")[2]


@pytest.mark.smoke
def test_the_agent_ends_on_sigterm_and_takes_its_socket_with_it(sandbox: Sandbox, agent: Started) -> None:
    agent.send_signal(signal.SIGTERM)
    assert finish(agent).returncode == 0
    assert not list(sandbox.local.glob("*.sock"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sidecar_without_an_agent_ends_on_a_signal_whichever_of_its_threads_is_given_it(
    sandbox: Sandbox, number: signal.Signals
) -> None:
    code = f"""
import os, signal, sys, threading, time
from kcoord.cli import main
def given():
    while not os.path.exists("go"):
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), {int(number)})
threading.Thread(target=given, daemon=True).start()
sys.argv = ["kcoord", "agent", "--sidecar", "--lease-ttl", "soon"]
main()
"""
    sidecar = sandbox.start("-c", code)
    assert sidecar.stderr is not None
    assert "the job runs without an agent" in sidecar.stderr.readline()
    (sandbox.root / "go").touch()
    done = finish(sidecar, 20)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_second_agent_is_refused_and_stop_ends_the_first(sandbox: Sandbox, agent: Started) -> None:
    assert "listens" in kcoord(sandbox, "agent", code=1).stderr
    kcoord(sandbox, "agent", "--stop")
    assert finish(agent).returncode == 0
    assert "a job or 'kcoord agent' starts one" in kcoord(sandbox, "agent", "--stop", code=1).stderr


def test_an_agent_with_a_store_that_cannot_be_written_does_not_start(sandbox: Sandbox) -> None:
    line = kcoord(sandbox, "agent", "--store", "/proc/nowhere", code=2).stderr
    assert line.startswith("kcoord: KCOORD_STORE=/proc/nowhere")
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("command", [["status"], ["agent", "--stop"]], ids=" ".join)
def test_of_an_agent_that_hangs_it_is_not_said_that_there_is_none(
    sandbox: Sandbox, agent: Started, command: list[str]
) -> None:
    pause(agent)
    said = kcoord(sandbox, *command, code=1, KCOORD_AGENT_TIMEOUT="0.5").stderr
    agent.send_signal(signal.SIGCONT)
    assert said.startswith("kcoord: no agent answers at ")
    assert "timed out" in said
    assert len(said.splitlines()) == 1


def test_status_shows_who_compiles_and_who_waits(sandbox: Sandbox, agent: Started) -> None:
    ranks = [sandbox.fork_kcoord(RANK, "1", "600", RANK=str(r)) for r in range(3)]
    try:
        eventually(lambda: any(len(f["waiting"]) == 2 for f in as_json(sandbox, "status")["flights"]))
        (flight,) = as_json(sandbox, "status")["flights"]
        assert (flight["name"], flight["state"]) == ("test:k0", "compiling")
        assert "rank" in flight["leader"]
        assert flight["seconds"] > 0
        shown = kcoord(sandbox, "status").stdout
        assert "test:k0" in shown
        assert flight["key"][:12] in shown, "which of the kernel's variants"
        assert "compiling" in shown
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    eventually(lambda: not as_json(sandbox, "status")["flights"])


def test_exec_passes_the_exit_code_on_and_prints_a_summary(sandbox: Sandbox) -> None:
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", "bash", "-c", f"{sys.executable} {RANK} 3 && exit 9")
    assert done.returncode == 9
    assert "3 kernels: 3 compiled, 0 loaded" in done.stderr
    assert not list(sandbox.local.glob("*.sock"))


def test_a_job_whose_local_directory_was_removed_ends_with_a_line_that_says_so(sandbox: Sandbox) -> None:
    command = f"rm -r {sandbox.local}; exec {sys.executable} {RANK} 1"
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", "bash", "-c", command)
    assert done.returncode == 0
    assert "No such file or directory: the agent has ended, or its directory was removed" in done.stderr
    assert "there is no summary" in done.stderr.splitlines()[-1]


def test_exec_tells_a_signals_death_as_a_shell_does(sandbox: Sandbox) -> None:
    assert sandbox.run_kcoord(*KCOORD, "exec", "--", "bash", "-c", "kill -9 $$").returncode == 128 + 9
    assert sandbox.run_kcoord(*KCOORD, "exec", "--", "no-such-command").returncode == 127
    assert sandbox.run_kcoord(*KCOORD, "exec").returncode == 2


def test_exec_forwards_signals(sandbox: Sandbox) -> None:
    up = sandbox.root / "up"
    trap = f"trap 'exit 5' TERM; touch {up}; while :; do sleep 0.05; done"
    job = sandbox.fork_kcoord(*KCOORD, "exec", "--", "bash", "-c", trap)
    eventually(up.exists)
    job.send_signal(signal.SIGTERM)
    assert finish(job).returncode == 5


def test_exec_disabled_is_the_command_alone(sandbox: Sandbox) -> None:
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", "env", KCOORD_DISABLE="1")
    assert "TRITON_CACHE_MANAGER" not in done.stdout
    assert done.stderr == ""
    assert sandbox.is_untouched


def test_stats_outlast_the_agent_and_hold_the_documented_counters(sandbox: Sandbox) -> None:
    for _ in range(2):
        sandbox.run_kcoord(*KCOORD, "exec", "--job", "my job", "--", sys.executable, str(RANK), "4")
    stats = as_json(sandbox, "stats", "--job", "my job")
    assert (stats["requests"], stats["compiles"], stats["local_hits"]) == (8, 4, 4)
    assert stats["saved_seconds"] > 0
    for name in ("memory_hits", "store_hits", "waits", "failures", "alone", "compile_seconds"):
        assert name in stats
    another = kcoord(sandbox, "stats", "--job", "another", "--json")
    assert json.loads(another.stdout)["requests"] == 0, "it may be a job that asked for nothing"
    assert another.stderr == "kcoord: nothing is known here of job 'another'; jobs of the last week: my job\n"
    assert "names no job" in kcoord(sandbox, "stats", "--job", "", code=2).stderr
    assert "job my job, this node only: 4 kernels: 4 compiled, 4 loaded" in kcoord(sandbox, "stats").stdout


def test_ls_lists_artifacts_and_explain_says_why_two_differ(sandbox: Sandbox) -> None:
    sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, str(RANK), "2")
    listed = as_json(sandbox, "ls")
    assert sorted(a["name"] for a in listed) == ["k0", "k1"]
    assert all(a["bytes"] > 0 and a["files"] == ["kernel.bin"] for a in listed)
    assert [a["name"] for a in as_json(sandbox, "ls", "k1")] == ["k1"]
    shown = kcoord(sandbox, "ls").stdout
    assert listed[0]["digest"][:12] in shown
    first, second = sorted(listed, key=lambda a: a["name"])
    difference = as_json(sandbox, "explain", first["digest"][:10], second["digest"][:10])["differences"]
    assert {"factor": "n", "from": "1", "to": "0"} in difference
    assert "n: 1 → 0" in kcoord(sandbox, "explain", first["digest"][:10], second["digest"][:10]).stdout
    assert "no other key" in kcoord(sandbox, "explain", "k0").stdout
    assert "no artifact has the key" in kcoord(sandbox, "explain", "nothing", code=1).stderr


@pytest.mark.parametrize("job", ["x" * 201, "a\nb"], ids=["long", "newline"])
def test_a_jobs_name_that_cannot_be_shown_is_refused_where_it_is_set(sandbox: Sandbox, job: str) -> None:
    done = kcoord(sandbox, "exec", "--job", job, "--", "true", code=2)
    assert "at most 200 characters" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ls_reads_the_store_where_there_is_one(sandbox: Sandbox) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store")}
    sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, str(RANK), "2", **store)
    elsewhere = {"KCOORD_LOCAL_DIR": str(sandbox.root / "elsewhere")}
    assert len(as_json(sandbox, "ls", **store, **elsewhere)) == 2


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["explain", "k"], ["verify"], ["gc"], ["gc", "--pins"], ["export", "--all", "out"], ["export", "job", "out"]],
    ids=" ".join,
)  # fmt: skip
def test_where_there_is_no_store_every_command_says_so(sandbox: Sandbox, arguments: list[str]) -> None:
    places = [sandbox.root / name for name in ("nothing", "file", "directory")]
    places[1].touch()
    places[2].mkdir()
    for place in places if arguments == ["ls"] else places[2:]:
        done = kcoord(sandbox, *arguments, code=1, KCOORD_STORE=str(place))
        why = "it is a file: name a directory in KCOORD_STORE" if place.is_file() else NO_STORE
        assert (done.stdout, done.stderr) == ("", f"kcoord: {place}: {why}\n")


@pytest.mark.parametrize("arguments", [["ls"], ["explain", "--help"]], ids=" ".join)
def test_output_that_has_no_room_is_one_line(sandbox: Sandbox, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, *KCOORD, *arguments], env=sandbox.env(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "kcoord: No space left on device: look at where the output goes\n")


def test_an_arrow_is_no_error_where_the_locale_has_none(sandbox: Sandbox) -> None:
    sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, str(RANK), "2")
    first, second = (artifact["digest"] for artifact in as_json(sandbox, "ls"))
    done = sandbox.run(*KCOORD, "explain", first, second, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2192" in done.stdout


def test_a_reader_that_has_seen_enough_ends_a_command_as_it_ends_cat(sandbox: Sandbox) -> None:
    out, end = os.pipe()
    os.close(out)
    with os.fdopen(end, "w") as pipe:
        done = subprocess.run(
            [sys.executable, *KCOORD, "ls"], env=sandbox.env(), stdout=pipe, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_what_is_to_be_printed_on_a_closed_stdout_is_one_line(sandbox: Sandbox) -> None:
    sandbox.run_kcoord(*KCOORD, "exec", "--job", "j", "--", sys.executable, str(RANK), "1")
    line = f"exec {sys.executable} -c '{KCOORD[1]}' trace -o - j >&-"
    done = subprocess.run(["bash", "-c", line], env=sandbox.env(), stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "kcoord: stdout is closed: name a file with -o\n")


def test_a_local_directory_that_cannot_be_written_is_a_fault_of_doctors_and_a_line_of_a_launchers(
    sandbox: Sandbox,
) -> None:
    with tmpfs(sandbox.local, "1m"):
        sandbox.local.chmod(0o700)
        read_only(sandbox.local)
        told = f"{sandbox.local}: it is on a read-only file system: mount it read-write, or unset it"
        assert [f["finding"] for f in findings(sandbox, code=1) if f["state"] == "fail"] == [told]
        done = kcoord(sandbox, "exec", "--", "echo", "it ran")
    assert (done.stdout, done.stderr) == ("it ran\n", f"kcoord: {told}; the job runs without kcoord\n")


def test_doctor_finds_nothing_wrong_with_a_good_setup(sandbox: Sandbox) -> None:
    with RedisServer() as server:
        settings = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_REDIS_URL": server.url}
        found = as_json(sandbox, "doctor", **settings)["findings"]
        assert not [f for f in found if f["state"] == "fail"]
        assert any("a file was published" in f["finding"] for f in found)
        assert any("a lease was taken" in f["finding"] for f in found)
        assert not [f for f in found if " off: " in f["finding"] or f["what"] == "hooks"], "the compilers are hooked"
        assert not list((sandbox.root / "store" / "v2" / "objects").glob("*/*")), "the probe is removed"


def test_doctor_finds_that_a_store_is_full(sandbox: Sandbox) -> None:
    store = sandbox.root / "full" / "store"
    with tmpfs(store.parent, "1m"), RedisServer() as server:
        settings = {"KCOORD_STORE": str(store), "KCOORD_REDIS_URL": server.url}
        findings(sandbox, **settings)
        with contextlib.suppress(OSError), (store.parent / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(1 << 16)):
                pass
        (found, *_) = [f for f in findings(sandbox, **settings) if f["what"] == "store"]
    assert found["state"] == "warn"
    assert "none are published" in found["finding"]
    assert "its file system is full" in found["remedy"]


@pytest.mark.parametrize(
    ("setting", "value", "what"),
    [
        ("KCOORD_STORE", "/proc/nowhere", "store"),
        ("KCOORD_REDIS_URL", "redis://:secret@127.0.0.1:1/0", "Redis"),
        ("KCOORD_LOCAL_DIR", "/proc/nowhere", "local directory"),
    ],
)
def test_doctor_names_what_is_wrong_and_the_remedy(sandbox: Sandbox, setting: str, value: str, what: str) -> None:
    found = findings(sandbox, code=1, **{setting: value})
    failed = [f for f in found if f["state"] == "fail"]
    assert any(f["remedy"] for f in failed)
    assert {f["what"] for f in failed} == {what}, "one fault is not told of as two"
    assert "secret" not in str(found)


def test_a_path_is_text_and_no_markup_and_is_not_cut_where_the_terminal_is_narrow(sandbox: Sandbox) -> None:
    settings = {
        "KCOORD_LOCAL_DIR": str(sandbox.root / ("l[red]" * 10)),
        "KCOORD_SOCKET": str(sandbox.root / ("s" * 60)),
    }
    shown = sandbox.run_kcoord(*DOCTOR, COLUMNS="80", **settings).stdout
    assert "…" not in shown
    assert shown.count("s") > 60
    assert shown.count("[red]") > 5
