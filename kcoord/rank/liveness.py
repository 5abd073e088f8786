"""Whether this node's agent answers. A probe asks every few seconds, so this imports little."""

from __future__ import annotations

import socket
import time

from kcoord.errors import ProtocolError
from kcoord.protocol import endpoint, frames
from kcoord.protocol.identity import (
    Identity,
)
from kcoord.settings import Settings

_LOOK_EVERY = 0.1  # seconds


def why_silent(settings: Settings, timeout: float) -> str:
    """Empty if the agent greets a client within `timeout` seconds; else what is wrong. None is ever started."""
    try:
        with endpoint.connect(settings.socket_path, timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(frames.encode_frame(Identity.here("probe").hello()), socket.MSG_NOSIGNAL)
            length = frames.frame_length(_received(connection, frames.HEADER_BYTES))
            reply = frames.decode_body(_received(connection, length))
    except (OSError, ProtocolError) as error:
        return f"no agent answers at {settings.socket_path}: {error}"
    if reply.get("op") != "welcome":
        return f"the agent at {settings.socket_path} refuses: {reply.get('why')!r:.200}"
    return ""


def await_agent(settings: Settings, within: float) -> str:
    """As `why_silent`, asked until it answers or `within` seconds are over."""
    deadline = time.monotonic() + within
    while why := why_silent(settings, min(within, settings.agent_timeout)):
        if time.monotonic() + _LOOK_EVERY > deadline:
            return why
        time.sleep(_LOOK_EVERY)
    return ""


def _received(connection: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        chunk = connection.recv(length - len(content))
        if not chunk:
            raise ConnectionResetError("it hung up")
        content += chunk
    return content
