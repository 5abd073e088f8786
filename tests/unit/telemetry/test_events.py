"""Notices, and the agent's log as JSON: one object a line, whatever is logged."""

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

from kcoord.telemetry.events import JsonFormatter, Notices
from tests.support.agents import ROOT, Node, until


def formatted(message: Any, *arguments: Any, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("kcoord.x", logging.WARNING, __file__, 1, message, arguments, more.get("exc_info"))
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


def test_an_error_has_its_traceback_in_the_same_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        found = formatted("it failed", exc_info=sys.exc_info())
    assert found["error"].startswith("Traceback")
    assert found["error"].endswith("ValueError: a\nb")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_agents_log_is_text_unless_it_is_set_to_json(log_format: str) -> None:
    with Node(log_format=log_format) as node:
        node.start()
        rank = node.rank("""
            lead = claim(client, "empty")
            client.publish(lead, key_of("empty"), local.new_staging(home_of("empty")), home_of("empty"), 0.5, "no device")
            say("refused")
        """)
        rank.expect("Lead")
        rank.expect("refused")
        log = node.directory / "started.log"
        until(log.read_text)
        line = log.read_text().splitlines()[0]
        message = json.loads(line)["message"] if log_format == "json" else line.removeprefix("kcoord: ")
        assert message.startswith("not published")


def test_a_format_that_there_is_not_is_refused_in_one_line(tmp_path: Path) -> None:
    code = "from kcoord.cli import main; main()"
    command = [sys.executable, "-c", code, "agent", "--log-format", "xml", "--local-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "kcoord: --log-format='xml': it must be text or json\n"


def test_a_notice_that_quotes_what_is_no_text_can_be_written_to_any_log(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    with caplog.at_level(logging.WARNING):
        assert notices.tell("no agent (b\udcffad)")
    assert notices.since(0) == (["no agent (b\\udcffad)"], 1)
    assert caplog.messages == ["kcoord: no agent (b\\udcffad)"]
    caplog.text.encode()
