"""One agent per node, however many ask for it at once; and nobody else's."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kcoord.errors import AgentUnavailable, StoreError
from kcoord.protocol import endpoint
from kcoord.rank import spawn
from kcoord.rank.client import AgentClient, Alone
from kcoord.telemetry.events import Notices
from tests.support import forked
from tests.support.agents import ROOT, Node, end_agent
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def _agents_have_interpreters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "enabled", False)


ASK = """
listen()
status = client.status()
say("agent", id=status["agent"])
listen()
"""


def ask_at_once(node: Node, count: int) -> set[str]:
    """The agents that `count` new processes find, all at the same moment."""
    ranks = [node.rank(ASK) for _ in range(count)]
    for rank in ranks:
        rank.tell()
    return {rank.expect("agent")["id"] for rank in ranks}


@pytest.mark.smoke
def test_ten_processes_that_start_at_once_get_one_agent() -> None:
    with Node() as node:
        assert len(ask_at_once(node, 10)) == 1
        assert len(node.agent_pids()) == 1


def test_ten_processes_get_one_agent_although_a_dead_one_left_its_socket() -> None:
    with Node() as node:
        agent = node.start()
        node.status()
        agent.kill()
        agent.wait()
        assert node.path.exists()
        assert len(ask_at_once(node, 10)) == 1
        assert len(node.agent_pids()) == 1


def test_an_agent_outlives_the_process_that_started_it() -> None:
    with Node() as node:
        rank = node.rank(ASK)
        rank.tell()
        started = rank.expect("agent")["id"]
        assert rank.end() == 0
        assert node.status()["agent"] == started


def test_an_agent_is_no_child_of_a_rank_s_session() -> None:
    with Node() as node:
        client = node.client()
        assert client.status()
        (pid,) = node.agent_pids()
        assert os.getsid(pid) != os.getsid(0)
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")


def test_an_agent_that_a_rank_started_which_blocks_signals_ends_when_it_is_told_to() -> None:
    """A script may block them in order to wait for them; what it starts has them blocked as well."""
    with Node() as node:
        rank = node.rank("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())" + ASK)
        rank.tell()
        rank.expect("agent")
        (pid,) = node.agent_pids()
        end_agent(pid)


def test_an_agent_is_started_by_a_daemon_that_has_closed_its_standard_streams() -> None:
    """What it opens then has their numbers, which are the agent's own standard streams."""
    with Node() as node:
        answered = node.directory / "answered"
        code = f"""
import os, pathlib
os.closerange(0, 3)
from tests.support.agents import as_rank
client, _ = as_rank()
pathlib.Path({str(answered)!r}).write_text(str(client.status() is not None))
"""
        subprocess.run([sys.executable, "-c", code], env=node.environ(), cwd=ROOT, timeout=60, check=True)
        assert answered.read_text() == "True"


def test_an_agent_knows_no_rank_and_every_setting() -> None:
    with Node(max_wait="123", idle_timeout="60") as node:
        rank = node.rank(ASK, RANK="3", LOCAL_RANK="1", KCOORD_JOB="job")
        rank.tell()
        rank.expect("agent")
        (pid,) = node.agent_pids()
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert "KCOORD_MAX_WAIT=123.0" in environ
        assert not [e for e in environ if e.startswith(("RANK=", "LOCAL_RANK=", "KCOORD_JOB="))]
        assert node.status()["settings"]["max_wait"] == 123.0


def test_without_permission_to_start_one_nobody_is_asked() -> None:
    with Node(spawn="0") as node:
        with pytest.raises(AgentUnavailable, match="KCOORD_SPAWN=0"):
            spawn.find_or_start(node.settings)
        assert not node.path.exists()


def test_the_socket_is_for_this_user_alone() -> None:
    with Node() as node:
        client = node.client()
        assert client.status()
        assert stat.S_IMODE(node.path.stat().st_mode) == 0o600


def test_binding_leaves_the_other_threads_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A umask belongs to the process: a directory that another thread makes meanwhile would have no x."""

    def refuse(mask: int) -> int:
        raise AssertionError("the process's umask was changed")

    with Node() as node:
        monkeypatch.setattr(os, "umask", refuse)
        with endpoint.bind(node.path):
            assert stat.S_IMODE(node.path.stat().st_mode) == 0o600


def test_a_directory_of_another_user_is_refused() -> None:
    if os.getuid() == 0:
        with Node() as node:
            inside = node.directory / "theirs"
            inside.mkdir()
            os.chown(inside, 65534, 65534)
            check_refused(node, inside)
    else:
        with Node() as node:
            check_refused(node, Path("/usr"))


def test_a_socket_in_a_directory_of_all_users_is_refused_with_the_setting_that_put_it_there() -> None:
    with Node() as node:
        settings = node.with_flags(socket=f"/tmp/{node.directory.name}.sock")
        with pytest.raises(AgentUnavailable, match="set KCOORD_SOCKET to") as caught:
            spawn.find_or_start(settings)
        assert "chmod" not in str(caught.value), "/tmp is everybody's for a reason"


def test_a_file_that_is_no_socket_is_nobody_s_to_replace() -> None:
    """A slip in KCOORD_SOCKET must cost no file."""
    with Node() as node:
        file = node.directory / "checkpoint.pt"
        file.write_text("weeks of work")
        with pytest.raises(AgentUnavailable, match=r"checkpoint\.pt"):
            spawn.find_or_start(node.with_flags(socket=str(file)))
        assert file.read_text() == "weeks of work"


def check_refused(node: Node, directory: Path) -> None:
    settings = node.with_flags(socket=str(directory / "agent.sock"))
    with pytest.raises(AgentUnavailable, match="belongs to user") as caught:
        spawn.find_or_start(settings)
    assert isinstance(caught.value.__cause__, StoreError)
    assert isinstance(node.claim(AgentClient(settings, Notices()), "k"), Alone)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
def test_an_agent_of_another_user_is_not_trusted() -> None:
    """Who can make us believe that an artifact is ready can make us load it."""
    with Node() as node:
        node.directory.chmod(0o777)
        impostor = node.rank(
            """
            import os, socket
            path = str(Settings.from_environ().socket_path)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                os.chmod(path, 0o666)
                listener.listen()
                say("listening")
                listen()
            """
        )
        impostor.expect("listening")
        with pytest.raises(PermissionError, match="user 65534 listens there"):
            endpoint.connect(node.path, 5)
        with pytest.raises(AgentUnavailable, match="user 65534"):
            spawn.find_or_start(node.settings)
        node.path.unlink()


def test_an_agent_that_ends_removes_its_own_socket_only() -> None:
    with Node() as node:
        node.start().terminate()
        mine = endpoint.identity_of(node.path)
        for _ in range(50):  # the file system may give the same inode again
            with endpoint.bind(node.path):
                endpoint.unlink_own(node.path, mine, 5)
                assert node.path.exists(), "it removed its successor's socket"
        endpoint.unlink_own(node.path, endpoint.identity_of(node.path), 5)
        assert not node.path.exists()
        assert endpoint.identity_of(node.path) is None
        endpoint.unlink_own(node.path, None, 5)


def test_a_process_waits_for_an_agent_that_hangs_as_it_starts_only_so_long_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be stopped, or its interpreter may lie on a disk that hangs."""
    began = tmp_path / "began"
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {began}.part && mv {began}.part {began} && exec sleep 600\n")
    slow.chmod(0o700)
    monkeypatch.setattr(spawn, "interpreter", lambda: str(slow))
    with Node() as node:
        with pytest.raises(AgentUnavailable, match=r"has not started within 0\.5 s"):
            spawn.find_or_start(replace(node.settings, agent_timeout=0.5))
        eventually(began.exists)
        pid = int(began.read_text())
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{pid}").exists())  # nor is it left as a zombie


def test_a_frozen_program_does_not_start_itself_once_more_for_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `sys.executable` is no Python: it would train, and start itself once more."""
    with Node() as node:
        monkeypatch.setattr("sys.frozen", True, raising=False)
        monkeypatch.setattr("sys.executable", "/bin/true")
        with pytest.raises(AgentUnavailable, match="start 'kcoord agent' beside it"):
            spawn.find_or_start(node.settings)


def test_an_agent_that_cannot_start_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with Node() as node:
        monkeypatch.setattr("sys.executable", "/bin/false")
        with pytest.raises(AgentUnavailable, match=r"see .*\.log"):
            spawn.find_or_start(node.settings)
        monkeypatch.undo()
        client = node.client()
        assert client.status(), "and what it left is no obstacle"


def test_an_agent_that_ends_as_soon_as_it_has_started_is_told_with_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There it says why: a secret that others may read, for one."""
    key = tmp_path / "key"
    key.write_text("k " + "a" * 64)
    key.chmod(0o644)
    with Node(signing_key_file=str(key)) as node:
        client = node.client()
        assert isinstance(node.claim(client, "k"), Alone)
        log = node.path.with_suffix(".log")
        assert f"see {log}" in caplog.text
        assert "chmod 600" in log.read_text()
