"""Where a process reads a profile: from the store, or, where signatures are required, what the agent has verified for it.

Only the agent has the signing keys, and a profile names functions that are imported and called.
"""

from __future__ import annotations

from dataclasses import replace

from kcoord.agent.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


def readable(settings: Settings, name: str) -> Settings:
    """The settings with which this process is to load the profile `name`: without the store if it must not be read there.

    Asks a running agent, and starts none; waits for it as long as for any answer of an agent.
    """
    if settings.store is None:
        return settings
    client = AgentClient(settings, Notices())
    try:
        answer = client.ask({"op": "profile", "profile": name}, quietly=True, start=False)
    finally:
        client.close()
    keys = settings.signing_key_file is not None or settings.signing_key is not None
    checked = answer is not None and answer.get("checked") is True
    return replace(settings, store=None) if checked or (settings.trust == "require" and not keys) else settings
