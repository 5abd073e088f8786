"""An exchange with an agent, seen from the rank."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from kcoord.protocol import frames
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank.connection_pool import ConnectionPool
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


@pytest.mark.parametrize("heartbeats", [0, 1, 3])
def test_a_wait_is_told_once_also_if_a_heartbeat_comes_first(tmp_path: Path, heartbeats: int) -> None:
    pool = ConnectionPool(Settings.from_environ({}, local_dir=str(tmp_path)), Notices())
    ours, theirs = socket.socketpair()
    waits: list[str] = []
    told = threading.Event()

    def answer() -> None:
        told.wait(20)
        frames.send_frame(theirs, frames.encode_frame({"op": "busy", "id": 1}))

    with theirs, OwnSocket(ours) as connection:
        for _ in range(heartbeats):
            frames.send_frame(theirs, frames.encode_frame({"op": "waiting", "id": 1}))
        thread = threading.Thread(target=answer)
        thread.start()
        request = frames.encode_frame({"op": "claim", "id": 1})
        reply = pool.exchange(connection, request, time.monotonic() + 20, lambda: (waits.append("once"), told.set())[0])
        thread.join()
    assert reply["op"] == "busy"
    assert waits == ["once"]
