"""Work ahead, the rank's side: while a rank waits for a key, a helper process compiles upcoming keys of the profile.

The helper (`kcoord.warmup.ahead_process`) starts when the rank first waits, works only while it waits, and ends with it. The rank
never waits for the helper, except a millisecond or two for its start. The agent decides, key by key, how much of the node helpers
may use.

The helper is no child of the rank: a training script may wait for all its children, or be confused by one that it did not start.
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
from kcoord.settings import Settings, variable
from kcoord.telemetry.events import Notices

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}
"""Importing a module may touch the GPU, whose memory is the job's."""

_RENDEZVOUS = ("MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "PRTE_", "ORTE_", "HYDRA_", "MPIEXEC_")
"""With these, a module may join the process group or MPI's world, as a second process of the rank's number."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "  # before anything is imported from the working directory
    "from kcoord.warmup.ahead_process import main; main(sys.argv[1], int(sys.argv[2]))"
)
# a shell gives its background job no standard input
_BESIDE = '[ -x "$1" ] || exit 127; exec 3<&0; "$@" <&3 3<&- &'
_START = 5.0  # seconds for the shell to start it; it takes one or two milliseconds


class WorkAhead:
    """The helper of one process. Thread-safe and fork-safe. Not guaranteed: that it starts, or compiles anything."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        # protects all below; reentrant, since a signal's handler may come to wait while its thread is in here
        self._lock = threading.RLock()
        self._waiting = 0
        self._wanted = settings.profile is not None and settings.ahead > 0 and not settings.disable
        self._control: OwnSocket | None = None  # the helper ends when this closes

    @contextmanager
    def during(self, meanwhile: Callable[[], None] | None) -> Iterator[Callable[[], None] | None]:
        """Yields a function to call at the start of a wait; it calls `meanwhile` too. The helper rests after the block."""
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
        """End the helper for good: this process replays the profile itself, or there is none."""
        self._wanted = False
        self.close()

    def close(self) -> None:
        """End the helper without waiting for it. Another rank takes over its compile, as after any death.

        Not guaranteed: that it ends at once. A compiler that holds the GIL (Triton 3.4) finishes its compile first.
        """
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.close()

    def forget_after_fork(self) -> None:
        """The helper is the parent's, which it would outlive if a child kept its control open."""
        control, self._control = self._control, None
        self._lock, self._waiting = threading.RLock(), 0
        if control is not None:
            control.close()  # the child's copy only

    def _count(self, change: int) -> None:
        with self._lock:
            self._waiting += change
            if change > 0 and self._waiting == 1 and self._wanted:
                if self._control is None:
                    self._control = self._start()
                self._send(b"go\n")
            elif self._waiting == 0:
                self._send(b"rest\n")

    def _send(self, line: bytes) -> None:
        if self._control is None:
            return
        try:
            self._control.check()
            # no SIGPIPE, whose default action, if the script has restored it, ends the rank
            self._control.send(line, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # the helper has not read for thousands of waits; a later line will reach it
        except OSError as error:  # the helper has ended: nothing was left to compile
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
            raise RuntimeError("this process knows no Python interpreter to start")
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others, too
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
    """The rank's, with `settings`; but the helper joins no process group, records nothing, and has no helper."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_RENDEZVOUS)}
    return {**kept, **settings.to_environ(), **_NO_GPU, variable("ahead"): "0", variable("profile"): ""}
