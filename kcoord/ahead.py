"""Work ahead: while a rank waits for a key, a process beside it compiles upcoming keys of the profile.

The rank's side. The process (`kcoord.warmup.helper`) is started when the rank first waits, works only while it waits, and ends
with it. It cannot delay the rank's wake-up: nothing here waits for it. What it may use of the node the agent decides, key by key.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from kcoord.settings import Settings, variable
from kcoord.telemetry.events import Notices

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}
"""Modules may touch the GPU when they are imported. Its memory is the job's."""


class WorkAhead:
    """One process's helper. Thread-safe and fork-safe. Not guaranteed: that there is one, or that it gets anything done."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        self._lock = threading.Lock()  # protects all below
        self._waiting = 0
        self._wanted = settings.profile is not None and settings.ahead > 0 and not settings.disable
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def during(self, meanwhile: Callable[[], None] | None) -> Iterator[Callable[[], None] | None]:
        """Yields what is to be called when the caller has begun to wait, which then calls `meanwhile` too."""
        if not self._wanted:
            yield meanwhile
            return
        waits = False

        def begin() -> None:
            nonlocal waits
            waits = True
            self._count(1)
            if meanwhile is not None:
                meanwhile()

        try:
            yield begin
        finally:
            if waits:
                self._count(-1)

    def retire(self) -> None:
        """The process replays recipes itself, or knows that there are none: there is nothing to be ahead of any more."""
        self._wanted = False
        self.close()

    def close(self) -> None:
        """End the helper, whatever it is at: another rank takes that over, as after any death."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget_after_fork(self) -> None:
        """The parent's helper is the parent's; its end of the pipe must not stay open in a child."""
        process, self._process = self._process, None
        self._lock, self._waiting = threading.Lock(), 0
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.returncode = 0  # not ours to wait for

    def _count(self, change: int) -> None:
        with self._lock:
            self._waiting += change
            if self._waiting == max(change, 0):  # the first that waits, or the last
                self._tell(b"go\n" if self._waiting else b"rest\n")

    def _tell(self, line: bytes) -> None:
        if self._process is None and self._wanted:
            self._wanted = self._start()
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(OSError):  # it has ended: it had nothing more to do
                os.write(self._process.stdin.fileno(), line)

    def _start(self) -> bool:
        arguments = [sys.executable, "-m", "kcoord.warmup.helper", str(self._settings.profile), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                arguments,
                env=_environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._notices.tell(f"nothing is compiled ahead: {error}")
            return False
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return True


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """It records nothing, and has no helper of its own."""
    return {**environ, **_NO_GPU, variable("ahead"): "0"} | {variable("profile"): ""}
