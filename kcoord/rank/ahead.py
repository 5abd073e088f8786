"""Work ahead: while a rank waits for a key, a process beside it compiles upcoming keys of the profile.

The rank's side. The process (`kcoord.warmup.ahead_process`) is started when the rank first waits, works only while it waits, and
ends with it. Nothing here waits for it, so that it cannot delay the rank's wake-up; only its start takes a millisecond or two,
once. What it may use of the node the agent decides, key by key.

It is no child of the rank: a training script may wait for all its children, or be surprised by one that it did not start.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kcoord.interruption import let_through
from kcoord.protocol.own_socket import OwnSocket
from kcoord.settings import FIELDS, Settings, variable
from kcoord.telemetry.events import Notices

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}
"""Modules may touch the GPU when they are imported. Its memory is the job's."""

_RENDEZVOUS = ("MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "PRTE_", "ORTE_", "HYDRA_", "MPIEXEC_")
"""They may join the process group, too, or MPI's world. There is one rank of this number."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "  # nothing is imported from the working directory before it is replaced
    "from kcoord.warmup.ahead_process import main; main(sys.argv[1], int(sys.argv[2]))"
)
# a shell's background job has no standard input of its own
_BESIDE = '[ -x "$1" ] || exit 127; exec 3<&0; "$@" <&3 3<&- &'
_START = 5.0  # seconds that the shell may take for that; it takes one or two milliseconds


class WorkAhead:
    """One process's helper. Thread-safe and fork-safe. Not guaranteed: that there is one, or that it gets anything done."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        # protects all below; a signal's handler may come to wait while its thread is in here
        self._lock = threading.RLock()
        self._waiting = 0
        self._wanted = settings.profile is not None and settings.ahead > 0 and not settings.disable
        self._control: OwnSocket | None = None  # the helper ends when this does

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
        """End the helper, whatever it is at: another rank takes that over, as after any death. Waits for nothing.

        Not guaranteed: at once. A compiler that holds the GIL (Triton 3.4) ends its compile first.
        """
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.close()

    def forget_after_fork(self) -> None:
        """The parent's helper is the parent's; its control must not stay open in a child."""
        control, self._control = self._control, None
        self._lock, self._waiting = threading.RLock(), 0
        if control is not None:
            control.close()  # the child's copy only

    def _count(self, change: int) -> None:
        with self._lock:
            self._waiting += change
            if change > 0 and self._waiting == 1 and self._wanted:  # the first that waits
                if self._control is None:
                    self._control = self._start()
                self._tell(b"go\n")
            elif self._waiting == 0:
                self._tell(b"rest\n")

    def _tell(self, line: bytes) -> None:
        if self._control is None:
            return
        try:
            if not self._control.is_ours():
                raise ConnectionResetError("the script has closed its descriptor")
            # no SIGPIPE, whose default action, if the script has restored it, ends the rank
            self._control.send(line, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # it has not read for thousands of waits, and hears the next one
        except OSError as error:  # it has ended: it had nothing more to do
            let_through(error)
            self._wanted = False
            self._control.close()
            self._control = None

    def _start(self) -> OwnSocket | None:
        try:
            return OwnSocket(self._started())
        except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            let_through(error)
            self._wanted = False
            self._notices.tell(f"nothing is compiled ahead: {error}")
            return None

    def _started(self) -> socket.socket:
        if not sys.executable or getattr(sys, "frozen", False):
            raise RuntimeError("there is no interpreter of its own that could be started")
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python passes over others, too
        flags = ["-O"] * sys.flags.optimize
        program = [sys.executable, *flags, "-c", _PROGRAM, str(self._settings.profile), str(os.getpid()), *path]
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                shell = subprocess.Popen(
                    ["/bin/sh", "-c", _BESIDE, "sh", *program],
                    env=_environment(self._settings, os.environ),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            try:
                if shell.wait(_START):
                    raise RuntimeError(f"{sys.executable} cannot be started")
            except subprocess.TimeoutExpired:
                shell.kill()
                raise
        except BaseException:
            ours.close()
            raise
        return ours


def _environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The rank's, with its settings spelled out; the helper records nothing, has none of its own, and joins nothing."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_RENDEZVOUS)}
    for field in FIELDS:
        value = getattr(settings, field.name)
        if value is not None:
            kept[variable(field.name)] = str(int(value)) if isinstance(value, bool) else str(value)
    return {**kept, **_NO_GPU, variable("ahead"): "0", variable("profile"): ""}
