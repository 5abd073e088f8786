"""Whom and what a request is about, for the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcoord.protocol import fields
from kcoord.protocol.identity import (
    Identity,
)


def subject(who: Identity, message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `kcoord.telemetry.json_log.about`, as far as the client's message says them. Raises `ProtocolError`."""
    found: dict[str, Any] = {"job": who.job, "rank": who.rank, "pid": who.pid}
    if isinstance(message.get("key"), dict):
        key = fields.key(message)
        return found | {"key": key.digest, "backend": key.backend, "name": key.name}
    return found | {"key": message.get("digest"), "backend": message.get("backend"), "name": message.get("name")}
