"""New signing keys without a new agent: the key file is read again now and then, as it may be rotated while a job runs.

It has a thread of its own, which a file system that hangs holds for ever: nothing else waits for it.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kcoord.artifacts.signing import Trust, read_keys
from kcoord.errors import SettingsError
from kcoord.telemetry.events import Notices, log

EVERY = 30.0  # seconds; the kubelet itself takes a minute or two to bring a new Secret


class KeyWatch:
    """Gives `trust` the keys of the file at `path` when they have changed; the policy stays.

    A file that is gone, torn or open to others changes nothing: the keys that are known stay, which is told if the next look
    finds it so too. Not guaranteed: when. No method raises.
    """

    def __init__(self, trust: Trust, path: Path | None, notices: Notices) -> None:
        self._trust, self._path, self._notices = trust, path, notices
        self._io = ThreadPoolExecutor(1, "keys")
        self._looking: Future[None] | None = None
        self._due = time.monotonic() + EVERY
        self._failures = 0

    def pulse(self) -> None:
        """Begin to look if it is time to. Call it about once a second."""
        now = time.monotonic()
        if self._path is None or now < self._due or (self._looking is not None and not self._looking.done()):
            return
        self._due = now + EVERY
        self._looking = self._io.submit(self._look, self._path)

    def close(self) -> None:
        self._io.shutdown(wait=False, cancel_futures=True)

    def _look(self, path: Path) -> None:
        try:
            keys = read_keys(path)
        except SettingsError as error:
            self._failures += 1
            if self._failures == 2:  # the kubelet gives the group its right to read a moment after it has written
                self._notices.tell(f"{error}; the keys that were read before stay in use", about="signing keys")
            return
        self._failures = 0
        if list(keys.items()) == list(self._trust.keys.items()):
            return
        self._trust.keys = keys
        first, *others = keys
        more = f"; {', '.join(others)} verify, too" if others else ""
        log.warning("kcoord: new signing keys: %s signs%s", first, more)
