"""Accepts clients, and receives the first bytes of each with the descriptors that come with them: asyncio would drop these."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack

from kcoord.protocol.endpoint import BACKLOG
from kcoord.protocol.peer import Peer, peer_of, receive_first

_BREATHER = 0.2  # seconds, while there are too many open files

Client = Callable[[Peer, bytes, list[int]], asyncio.Protocol]
"""``client(peer, first bytes, descriptors)`` serves a client, and closes the descriptors."""


class Acceptor:
    """Accepts clients at `listener` until `close`, each of which has `within` seconds for its first bytes.

    Nothing is read of another user's process: its first bytes are empty.
    """

    def __init__(self, listener: socket.socket, client: Client, within: float) -> None:
        self._listener, self._client, self._within = listener, client, within
        self._arriving: set[asyncio.Task[None]] = set()
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Close the listener. Connections stay open, except for those that have said nothing yet."""
        for task in (self._accepting, *self._arriving):
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # the connection stays in the queue
                await asyncio.sleep(_BREATHER)
                continue
            task = asyncio.create_task(self._arrive(connection))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)
            await asyncio.sleep(0)  # thousands may be in the queue

    async def _arrive(self, connection: socket.socket) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        with ExitStack() as unless_served:
            unless_served.callback(connection.close)
            try:
                peer, first, passed = peer_of(connection), b"", list[int]()
                if peer.uid == os.getuid():
                    loop.add_reader(connection, readable.set)
                    try:
                        await asyncio.wait_for(readable.wait(), self._within)
                    finally:
                        loop.remove_reader(connection)
                    first, passed = receive_first(connection)
            except (OSError, asyncio.TimeoutError):
                return
            client = self._client(peer, first, passed)
            unless_served.pop_all()
            await loop.connect_accepted_socket(lambda: client, connection)
