"""An exchange with an agent, seen from the rank."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from kcoord.protocol import frames
from kcoord.protocol.messages import BUSY
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


def test_a_wait_is_told_once(tmp_path: Path) -> None:
    client = AgentClient(Settings.from_environ({}, local_dir=str(tmp_path)), Notices())
    ours, theirs = socket.socketpair()
    waits: list[str] = []
    told = threading.Event()

    def answer() -> None:
        told.wait(20)
        frames.send_frame(theirs, frames.encode_frame({"op": "waiting", "id": 1}))
        frames.send_frame(theirs, frames.encode_frame({"op": "busy", "id": 1}))

    with theirs, OwnSocket(ours) as connection:
        thread = threading.Thread(target=answer)
        thread.start()
        request = frames.encode_frame({"op": "claim", "id": 1})
        answer = client._exchange(
            connection, request, time.monotonic() + 20, lambda: (waits.append("once"), told.set())[0]
        )
        thread.join()
    assert answer is BUSY
    assert waits == ["once"]
