"""Notices, which are warnings for the user, each logged once; and the formats of logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

log = logging.getLogger("kcoord")


def plain(text: str) -> str:
    """`text` as a terminal or a log may have it: characters that are not printable are replaced, but for line ends and tabs.

    It may quote names from a store, and errors of a server.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def log_to_stderr(form: str) -> None:
    """Log warnings and errors of this process on stderr, in logging's format `form`, with their tracebacks: `plain`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain(form))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` in UTC (RFC 3339), ``message``, and ``error``, the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        import json  # ranks write none

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


def log_as(log_format: str) -> None:
    """Log in this format from now on."""
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


class Notices:
    """Lines for the user, each logged once however often it is told; at most `_MOST` lines.

    Thread-safe and fork-safe without a lock: `dict.setdefault` is atomic, and a dict keeps its order.
    """

    _MOST = 200

    def __init__(self) -> None:
        # subject → the line, and whether it passes, in a tuple whose identity shows who came first
        self._told: dict[tuple[str, int], tuple[str, bool]] = {}
        self._programs = 0

    def renew(self) -> None:
        """Another program comes: lines that pass may be told once more."""
        self._programs += 1

    def tell(self, line: str, *, about: str | None = None, passing: bool = False) -> bool:
        """Log `line` unless a line with the same `about` (default: the line) was told before. True if it was logged.

        `passing`: it is about a program that runs now, and means nothing to later ones.

        Lone surrogates, which no log file takes, are escaped, and other control characters replaced: lines quote paths, compilers
        and peers.
        """
        line = plain(line.encode("utf-8", "backslashreplace").decode())
        mine, subject = (line, passing), (about or line, self._programs if passing else 0)
        if len(self._told) >= self._MOST or self._told.setdefault(subject, mine) is not mine:
            return False
        log.warning("kcoord: %s", line)
        return True

    def since(self, position: int, came: int = 0) -> tuple[list[str], int]:
        """The lines told after `position`, and the position after them. Lines that pass count from the position `came`."""
        told = list(self._told.values())
        lines = [
            line for at, (line, passing) in enumerate(told) if at >= (max(position, came) if passing else position)
        ]
        return lines, len(told)


def tell_bug(error: BaseException, consequence: str, tell: Callable[[str], object] | None = None) -> None:
    """Report an unexpected `error` of the agent: traceback and `consequence` to the log, one line to the user by `tell`."""
    bug = "an error in the agent, please report it"
    if tell is not None:
        tell(f"{bug}: {type(error).__name__}: {error}")
    log.error("%s: %s", bug, consequence, exc_info=error)


def tell_if_failed(
    task: asyncio.Future[Any] | Future[Any], consequence: str, tell: Callable[[str], object] | None = None
) -> bool:
    """`tell_bug` if `task`, which is done, has ended with an error; returns True then. Cancellation is no error."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        tell_bug(error, consequence, tell)
    return error is not None
