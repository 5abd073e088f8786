"""The agent's log as JSON for log collectors, one object a line: KCOORD_LOG_FORMAT=json.

``time`` is in UTC (RFC 3339), ``message`` is the line of the text log, and ``error``, where there is one, the traceback.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from types import TracebackType


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage().removeprefix("kcoord: "),
            "logger": record.name,
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)  # ASCII without line ends: one line for every reader


def use(log_format: str) -> None:
    """Log in this format from now on. ``json`` also logs Python's warnings and an error that ends the process."""
    if log_format != "json":
        return
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("kcoord").critical("the process ends: %s", error, exc_info=(kind, error, trace))
