"""What the processes of a round say: one JSON object a line.

A SIGKILL may tear the last line of a process, where it crosses a page; the next process begins on a new line. Times are
`time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Journal:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def say(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "t": time.monotonic(), **facts}).encode()
        rest = b"\n" + line + b"\n"
        while rest:
            rest = rest[os.write(self._fd, rest) :]


class Reader:
    """`new` gives what was appended since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            with suppress(ValueError):  # torn
                found += [json.loads(line)] if line else []
        return found
