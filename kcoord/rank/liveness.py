"""Liveness probes of this node's agent. A probe runs every few seconds, so this module imports little."""

from __future__ import annotations

import time
from dataclasses import replace

from kcoord.errors import ProtocolError
from kcoord.protocol import endpoint, frames
from kcoord.protocol.identity import Identity
from kcoord.settings import Settings

_LOOK_EVERY = 0.1  # seconds


def why_silent(settings: Settings, timeout: float) -> str:
    """Empty if the agent greets a client within `timeout` seconds, else the reason. Never starts an agent."""
    try:
        with endpoint.connect(settings.socket_path, timeout) as connection:
            connection.settimeout(timeout)
            who = Identity.here(replace(settings, job="probe"))
            frames.send_frame(connection, frames.encode_frame(who.hello()))
            reply = frames.receive_frame(connection)
    except (OSError, ProtocolError) as error:
        return f"no agent answers at {settings.socket_path}: {error}"
    if reply.get("op") != "welcome":
        return f"the agent at {settings.socket_path} refuses: {reply.get('why')!r:.200}"
    return ""


def await_agent(settings: Settings, within: float) -> str:
    """`why_silent`, repeated until the agent answers or `within` seconds are over."""
    deadline = time.monotonic() + within
    while why := why_silent(settings, min(within, settings.agent_timeout)):
        if time.monotonic() + _LOOK_EVERY > deadline:
            return why
        time.sleep(_LOOK_EVERY)
    return ""
