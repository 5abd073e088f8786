"""The agent's log as JSON: one object a line, whatever is logged, with the request that it came of."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kcoord.telemetry.json_log import JsonFormatter, about
from tests.support.agents import ROOT, Node, key_of, until


def formatted(message: Any, *arguments: Any, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("kcoord.x", logging.WARNING, __file__, 1, message, arguments, more.pop("exc_info", None))
    for name, value in more.items():
        setattr(record, name, value)
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable(), "one line"
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_says_when_how_grave_what_and_who() -> None:
    found = formatted("kcoord: the store\n%s “is” back", "\x1b[31m/a")
    moment = found.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)
    assert datetime.fromisoformat(moment.replace("Z", "+00:00")).utcoffset() == timedelta(0)
    assert found == {"level": "warning", "message": "the store\n\x1b[31m/a “is” back", "logger": "kcoord.x"}


def test_a_message_whose_arguments_do_not_fit_is_a_line_all_the_same() -> None:
    assert formatted("%d of %d", "seven")["message"] == "%d of %d"
    assert formatted({"a": {1}})["message"] == "{'a': {1}}"


def test_an_error_has_its_traceback_in_the_same_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        found = formatted("it failed", exc_info=sys.exc_info())
    assert found["error"].startswith("Traceback")
    assert found["error"].endswith("ValueError: a\nb")


def test_what_a_line_is_about_is_in_it_if_it_is_known_and_prints() -> None:
    with about(job="a\nb", rank=0, key=None, backend=["x"], name="k" * 999, other="not a field"):
        found = formatted("m", key="abc")
    assert found["job"] == "a\N{REPLACEMENT CHARACTER}b"
    assert (found["rank"], found["key"]) == (0, "abc")
    assert len(found["name"]) == 200
    assert not {"backend", "other", "pid"} & found.keys()
    assert "job" not in formatted("m")


_REFUSED = """
lead = claim(client, "empty")
client.publish(lead, key_of("empty"), local.new_staging(home_of("empty")), home_of("empty"), 0.5, "no device")
say("refused")
"""


@pytest.mark.parametrize("started_by_a_rank", [False, True])
def test_a_notice_in_an_agents_log_names_the_job_the_rank_and_the_key(started_by_a_rank: bool) -> None:
    with Node(log_format="json") as node:
        if not started_by_a_rank:
            node.start()
        rank = node.rank(_REFUSED, RANK="3", KCOORD_JOB="job-7")
        rank.expect("Lead")
        rank.expect("refused")
        logs = "agent-*.log" if started_by_a_rank else "started.log"
        until(lambda: any(log.read_text() for log in node.directory.glob(logs)))
        (log,) = node.directory.glob(logs)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        (notice,) = (line for line in lines if line["message"].startswith("not published"))
        key = key_of("empty")
        assert (notice["job"], notice["rank"], notice["pid"]) == ("job-7", 3, rank.pid)
        assert (notice["key"], notice["backend"], notice["name"]) == (key.digest, key.backend, key.name)
        assert (notice["level"], notice["logger"]) == ("warning", "kcoord")


def test_without_the_setting_the_log_is_text() -> None:
    with Node() as node:
        node.start()
        rank = node.rank(_REFUSED, RANK="3")
        rank.expect("Lead")
        rank.expect("refused")
        log = node.directory / "started.log"
        until(log.read_text)
        assert log.read_text().startswith("kcoord: not published")


def test_warnings_and_the_error_that_ends_the_process_are_lines_too() -> None:
    code = (
        "import logging, warnings; from kcoord.telemetry import json_log\n"
        "logging.basicConfig(); json_log.use('json')\n"
        "warnings.warn('a warning', stacklevel=1)\n"
        "raise RuntimeError('the end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    warning, end = map(json.loads, done.stderr.splitlines())
    assert warning["logger"] == "py.warnings"
    assert (end["level"], end["message"]) == ("critical", "the process ends: the end")
    assert "RuntimeError" in end["error"]


def test_a_format_that_there_is_not_is_refused_in_one_line(tmp_path: Path) -> None:
    code = "from kcoord.cli import main; main()"
    command = [sys.executable, "-c", code, "agent", "--log-format", "xml", "--local-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "kcoord: --log-format='xml': it must be text or json\n"
