"""What a person sees of a warm-up while it lasts."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.replay.warmup import Walk
from kcoord.telemetry.progress import Look, line_of, seconds_left, shown
from tests.support.profiles import PROGRAM, give, record
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish

SECONDS = [4.0, 2.0, 1.0, 1.0]


def test_the_time_left_is_that_of_the_shortest_keys_shared_by_the_ranks() -> None:
    assert seconds_left(SECONDS, 0, 2) == 4.0, "never less than the longest key"
    assert seconds_left(SECONDS, 1, 1) == 4.0
    assert seconds_left(SECONDS, 2, 2) == 1.0
    assert seconds_left(SECONDS, 4, 2) == 0.0
    assert seconds_left(SECONDS, 9, 0) == 0.0


def test_a_line_says_what_is_done_what_is_left_and_who_is_at_it() -> None:
    look = Look(1, 1, ("node (rank 3): rms_norm 2.1 s", "node (rank 4): jsd 0.1 s", "more"))
    expected = "warm-up llama: 1 of 4 keys, 1 compiled, about 4 s left, "
    assert (
        line_of("warm-up llama", look, SECONDS, 1)
        == expected + "node (rank 3): rms_norm 2.1 s; node (rank 4): jsd 0.1 s"
    )
    assert line_of("warm-up llama", Look(4, 2), SECONDS, 1) == "warm-up llama: 4 of 4 keys, 2 compiled"


def test_a_log_gets_lines() -> None:
    log = io.StringIO()
    with shown("warm-up", SECONDS, 1, lambda: Look(2, 2), log, first=0.01, every=0.01):
        eventually(lambda: log.getvalue().count("\n") >= 2)
    assert set(log.getvalue().splitlines()) == {"kcoord: warm-up: 2 of 4 keys, 2 compiled, about 2 s left"}


def test_a_warm_up_that_is_over_at_once_says_nothing() -> None:
    log = io.StringIO()
    with shown("warm-up", SECONDS, 1, lambda: Look(4, 0), log):
        pass
    assert log.getvalue() == ""
    assert not [t for t in threading.enumerate() if t.name.startswith("Thread") and not t.daemon]


def test_a_stream_that_is_closed_stops_the_lines_and_nothing_else() -> None:
    log = io.StringIO()
    log.close()
    others = set(threading.enumerate())  # what an earlier test left may outlast it
    with shown("warm-up", SECONDS, 1, lambda: Look(1, 1), log, first=0.01):
        eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("Thread") and t not in others])


class _Plain:
    """What scripts put into the place of sys.stderr: no `closed`, no `isatty`."""

    said = ""

    def write(self, text: str) -> int:
        self.said += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_stream_that_can_do_no_more_than_write_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Plain()
    monkeypatch.setattr(sys, "stderr", stream)
    with shown("warm-up", SECONDS, 1, lambda: Look(2, 2), first=0.01):
        eventually(lambda: "2 of 4 keys" in stream.said)


def test_an_agent_that_does_not_answer_holds_up_no_warm_up() -> None:
    """It is asked in the thread that shows."""
    asked: list[str] = []

    def status() -> dict[str, Any]:
        asked.append(threading.current_thread().name)
        return {"flights": [{"state": "compiling", "leader": "rank 3", "name": "triton:jsd", "seconds": 2.14}]}

    walk, log = Walk(SimpleNamespace(status=status), 4), io.StringIO()  # type: ignore[arg-type]
    with shown("warm-up", SECONDS, 1, walk.look, log, first=0.01, every=0.01):
        assert walk.settle("f", lambda waits: ("compiled", "")) == "compiled"
        eventually(lambda: "1 of 4 keys, 1 compiled, about 4 s left, rank 3: jsd 2.1 s" in log.getvalue())
    assert threading.current_thread().name not in asked


def test_rank_0_shows_the_whole_job_and_the_others_nothing(sandbox: Sandbox) -> None:
    give(sandbox, record(sandbox, count=6))
    often = "import functools, runpy, sys\nimport kcoord.replay.warmup as warmup\n"
    often += "warmup.shown = functools.partial(warmup.shown, every=0.2)\n"
    program = f"{often}sys.argv[:] = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    ranks = [
        sandbox.fork_kcoord("-c", program, PROGRAM, "warm", "6", PROFILE="job", SECONDS_EACH="0.8", RANK=str(n),
                            LOCAL_RANK=str(n), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", PYTHONPATH=str(PROGRAM.parent))
        for n in range(2)
    ]  # fmt: skip
    done = [finish(r) for r in ranks]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr
    lines = [line for line in done[0].stderr.splitlines() if "warm-up job" in line]
    whole = re.compile(r"warm-up job: (\d) of 6 keys, (\d) compiled.* \(rank [01], pid \d+\): make \d")
    assert any(map(whole.search, lines)), lines
    assert "warm-up job" not in done[1].stderr


def test_a_function_of_ones_own_is_told_instead(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import kcoord

    profiled = __import__("profiled")
    told: list[tuple[int, int]] = []
    kcoord.warmup([(profiled.make, (n,)) for n in range(3)], progress=lambda done, every: told.append((done, every)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    sys.modules.pop("profiled")


def test_the_command_shows_its_processes(sandbox: Sandbox) -> None:
    give(sandbox, record(sandbox, count=4))
    command = ["-c", "from kcoord.cli import main; main()", "warmup", "job", "--workers", "2"]
    done = sandbox.run(*command, PYTHONPATH=f"{PROGRAMS}:{os.environ.get('PYTHONPATH', '')}", SECONDS_EACH="1.5")
    assert done.returncode == 0, done.stderr
    assert re.search(r"kcoord: warm-up job: \d of 4 keys, \d compiled", done.stderr)
    assert "4 compiled" in done.stdout
