"""The agent's log as JSON, one object a line, for what collects logs: KCOORD_LOG_FORMAT=json.

=========== ========================================================================================================
``time``    RFC 3339, UTC, milliseconds
``level``   debug, info, warning, error, critical
``message`` what the text log says
``logger``  whose message it is
``job``     of the request that it came of, where it came of one; so ``rank``, ``pid``, ``key`` (a digest), ``backend``, ``name``
``error``   the traceback, where there is one
=========== ========================================================================================================

`about` sets what the fields of a request are, for the task that serves it and for all tasks that it begins. Of a flight with many
claimants it is the one whose claim began it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from kcoord.telemetry.spans import plain_text

FORMATS = ("text", "json")
FIELDS = ("job", "rank", "pid", "key", "backend", "name")
"""Of a request; also taken from a record that was logged with them as `extra`, but ``name``, which is the logger's there."""
_LONGEST = 64 << 10  # characters of a message or a traceback
_about: ContextVar[Mapping[str, Any] | None] = ContextVar("about", default=None)


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Lines that are logged inside, and in tasks that are begun inside, have `fields`; those that are None are left out.

    Values may be a stranger's: what is neither a number nor text that prints is replaced, or left out.
    """
    token = _about.set(fields)
    try:
        yield
    finally:
        _about.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Never raises for a message's sake."""

    def format(self, record: logging.LogRecord) -> str:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit
            message = str(record.msg)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.created * 1000) % 1000:03d}Z",
            "level": record.levelname.lower(),
            "message": message.removeprefix("kcoord: ")[:_LONGEST],
            "logger": record.name,
        }
        said = _about.get() or {}
        for name in FIELDS:
            value = getattr(record, name, None) if name != "name" else None
            value = said.get(name) if value is None else value
            if isinstance(value, str):
                value = plain_text(value)
            if isinstance(value, (str, int)) and not isinstance(value, bool):
                line[name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)[-_LONGEST:]
        return json.dumps(line)  # ASCII, and no line ends in it: whatever reads this knows where it ends


def use(log_format: str) -> None:
    """Let what this process logs be of this format from now on; ``text`` changes nothing. Warnings, and an error that ends the
    process, are logged then too."""
    if log_format != "json":
        return
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("kcoord").critical("the process ends: %s", error, exc_info=(kind, error, trace))
