"""The agent's log as JSON, one object a line, for log collectors: KCOORD_LOG_FORMAT=json.

=========== ========================================================================================================
``time``    RFC 3339, UTC, milliseconds
``level``   debug, info, warning, error, critical
``message`` the line of the text log
``logger``  the logger's name
``job``     of the request behind the line, if there is one; so ``rank``, ``pid``, ``key`` (a digest), ``backend``, ``name``
``error``   the traceback, where there is one
=========== ========================================================================================================

`about` sets the fields of a request for the task that serves it and for all tasks that it begins. A flight with many claimants
has the fields of the claim that began it.
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

FIELDS = ("job", "rank", "pid", "key", "backend", "name")
"""The fields of a request. A record's `extra` may have them, too, but for ``name``, which is the logger's there."""
_LONGEST = 64 << 10  # characters of a message or a traceback
_about: ContextVar[Mapping[str, Any] | None] = ContextVar("about", default=None)


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Give `fields` to the lines that are logged in the block and in tasks that begin in it. None is left out.

    Values may be untrusted: unprintable characters are replaced, and a value that is neither a number nor text is left out.
    """
    token = _about.set(fields)
    try:
        yield
    finally:
        _about.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Never raises because of a message."""

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
        fields = _about.get() or {}
        for name in FIELDS:
            value = getattr(record, name, None) if name != "name" else None
            value = fields.get(name) if value is None else value
            if isinstance(value, str):
                value = plain_text(value)
            if isinstance(value, (str, int)) and not isinstance(value, bool):
                line[name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)[-_LONGEST:]
        return json.dumps(line)  # ASCII without line ends: one line for every reader


def use(log_format: str) -> None:
    """Log in this format from now on. ``text`` changes nothing; ``json`` also logs Python's warnings and an error that ends the
    process."""
    if log_format != "json":
        return
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("kcoord").critical("the process ends: %s", error, exc_info=(kind, error, trace))
