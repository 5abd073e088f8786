"""Where a process reads a profile: from the store, or, where signatures are required, what the agent has verified for it.

Only the agent has the signing keys, and a profile names functions that are imported and called.
"""

from __future__ import annotations

import time
from dataclasses import replace

from kcoord.errors import StoreError
from kcoord.protocol.messages import Profile, ProfileState
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_PATIENCE = 30.0  # seconds, of what reads the store, which may hang


def readable(settings: Settings, name: str) -> Settings:
    """The settings with which this process is to load the profile `name`: without the store if it must not be read there.

    Asks a running agent, and starts none; waits for it as long as for any answer of an agent, and while it says that it is still
    reading. Raises `StoreError` if it is after `_PATIENCE` seconds.
    """
    if settings.store is None:
        return settings
    client = AgentClient(settings, Notices())
    try:
        request, deadline = Profile(name), time.monotonic() + _PATIENCE
        answer = client.ask(request, ProfileState, quietly=True, start=False)
        while answer is not None and answer.late:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the agent has not read the profile {name!r} within {_PATIENCE:g} s: does the store hang?"
                )
            answer = client.ask(request, ProfileState, quietly=True, start=False)
    finally:
        client.close()
    mounted = settings.as_mounted()
    keys = mounted.signing_key_file is not None or mounted.signing_key is not None
    checked = answer is not None and answer.checked
    return replace(settings, store=None) if checked or (settings.trust == "require" and not keys) else settings
