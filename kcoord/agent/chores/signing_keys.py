"""New signing keys without a new agent: a key file that has changed is read again, as it may be rotated while a job runs."""

from __future__ import annotations

from kcoord.agent.chores.chore import Chore, DiskThread
from kcoord.artifacts.signing import Trust
from kcoord.errors import SettingsError
from kcoord.telemetry.events import Notices


def signing_keys(trust: Trust, notices: Notices, every: float = 30.0) -> list[Chore]:
    """The chore that looks at the file of `trust` every so many seconds; none without a file.

    A file that cannot be used is told, and the known keys stay. Not guaranteed: how soon new keys are seen; the kubelet itself
    takes a minute or two to bring a new Secret.
    """

    def look() -> None:
        try:
            trust.read_again()
        except SettingsError as error:
            notices.tell(f"{error}; the keys that were read before stay in use", about="signing keys")

    thread = DiskThread("signing-keys")
    return [Chore("signing keys", thread, thread.doing(look), notices, first=every, every=every)] if trust.path else []
