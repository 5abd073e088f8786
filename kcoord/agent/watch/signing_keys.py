"""New signing keys without a new agent: the key file is read again now and then, as it may be rotated while a job runs."""

from __future__ import annotations

from pathlib import Path

from kcoord.agent.chores.chore import Chore, Lane
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.signing_keys import read_keys
from kcoord.errors import SettingsError
from kcoord.telemetry.events import Notices, log

EVERY = 30.0  # seconds; the kubelet itself takes a minute or two to bring a new Secret


class SigningKeyWatch:
    """Gives `trust` the keys of the file at `path` when they have changed; the policy stays.

    A file that is gone, torn or open to others changes nothing: the known keys stay in use, which is told if the next look
    finds it so too. Not guaranteed: how soon new keys are seen.
    """

    def __init__(self, trust: Trust, path: Path | None, notices: Notices) -> None:
        self._trust, self._notices = trust, notices
        self._failures = 0
        self.chores: list[Chore] = []
        if path is not None:
            lane = Lane("signing-keys")
            look = lane.doing(lambda: self._look(path))
            self.chores = [Chore("signing keys", lane, look, notices, first=EVERY, every=EVERY)]

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
        log.warning("kcoord: new signing keys: %s", self._trust.roles())
