"""Connections to the server that has a namespace's keys, and commands to it while a Redis Cluster moves them.

All keys of a namespace have one hash tag, thus one slot, which one master of a Redis Cluster owns. Nodes say which one that is
(CLUSTER SLOTS); a single Redis says that it belongs to no cluster. A node that is the slot's owner no more answers MOVED: its
connection ends, and the next one leads to the new owner. News are heard at any node, since a cluster passes PUBLISH on to all.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kcoord.leases.redis_client import BROKEN, asked_of
from kcoord.leases.redis_pipeline import Pipeline

_Address = tuple[str, int]
_MOST_NODES = 1000  # that are remembered, as large as a Redis Cluster gets


class SlotOwner:
    """Makes connections to the owner of the slot of `name`, by ``make()``, which knows user, password and TLS.

    `given`: the nodes that the settings name; empty: ``make`` itself knows where the master is.
    """

    def __init__(self, make: Callable[[], Any], given: Iterable[_Address], name: str) -> None:
        self._make, self._given = make, tuple(given)
        self._slot = key_slot(name.encode())
        self._nodes = list(self._given)  # in the order in which they are asked
        self._alone = not self._given  # the server belongs to no cluster, or does not say

    @property
    def first(self) -> _Address | None:
        """The node that is asked first: the owner, once a connection was made. None: ``make`` knows."""
        return self._nodes[0] if self._nodes else None

    def doubt(self) -> None:
        """The owner may be gone, or own the slot no more: another node is asked first."""
        self._nodes = self._nodes[1:] + self._nodes[:1]
        self._alone = not self._given

    async def connect(self) -> Any:
        """A new connection to the owner. Known nodes are asked who that is, each once. Raises redis-py's errors."""
        if self._alone:
            return await self.open(self.first)
        failure: BaseException = RedisConnectionError(f"No node of the Redis Cluster has slot {self._slot}")
        left, asked = deque(self._nodes), set[_Address]()
        while left:
            node = left.popleft()
            if node in asked:
                continue
            asked.add(node)
            try:
                connection = await self.open(node)
                async with _closed_on_error(connection):
                    owner = await self._owner(connection, node)
            except BROKEN as error:
                failure = error
                self._nodes.sort(key=node.__eq__)  # the last one from now on
                continue
            if owner == node:
                return connection
            with suppress(*BROKEN):
                await connection.disconnect(nowait=True)
            left.appendleft(owner)
        raise failure

    async def open(self, node: _Address | None) -> Any:
        """A new connection to `node`."""
        connection = self._make()
        if node is not None:
            connection.host, connection.port = node
        async with _closed_on_error(connection):
            await connection.connect()
        return connection

    async def _owner(self, connection: Any, node: _Address) -> _Address:
        """The owner, as `node` names it, which is remembered with all other nodes; `node` itself if it is a single Redis."""
        await connection.send_command("CLUSTER", "SLOTS")
        try:
            ranges = await connection.read_response(disconnect_on_error=False)
        except ResponseError:  # no cluster, or a user who may not ask
            self._nodes.sort(key=node.__ne__)
            self._alone = True
            return node
        owners, nodes = [], []
        for first, last, *servers in ranges:
            addresses = [(_host((server[0] or b"").decode()) or node[0], int(server[1])) for server in servers]
            nodes += addresses
            if first <= self._slot <= last:
                owners += addresses[:1]  # the master
        if not owners:
            raise RedisConnectionError(f"No node of the Redis Cluster has slot {self._slot}")
        self._nodes = list(dict.fromkeys([*owners, *self._given, *nodes]))[:_MOST_NODES]
        return owners[0]


class SlotPipeline(Pipeline):
    """Commands to the slot's owner. While the slot is migrated, the owner answers with ASK for keys that it has not, and such
    commands go to the node that imports the slot.

    ``broke()``: a connection ended that commands were sent on. ``moved()``: another node than before is the owner.
    """

    def __init__(self, owner: SlotOwner, broke: Callable[[], object], moved: Callable[[], object]) -> None:
        super().__init__(self._to_owner, self._lost)
        self._owner, self._tell_broke, self._tell_moved = owner, broke, moved
        self._node: _Address | None = None  # that the connection leads to
        self._importer: tuple[_Address, Pipeline] | None = None

    async def ask(self, *command: Any) -> Any:
        try:
            return await super().ask(*command)
        except ResponseError as error:
            named, owner = asked_of(error), self._node
            if named is None or owner is None:
                raise
        importer = self._to_importer((_host(named[0]) or owner[0], named[1]))
        _, reply = await asyncio.gather(importer.ask("ASKING"), importer.ask(*command))  # they keep this order
        return reply

    def _to_importer(self, node: _Address) -> Pipeline:
        """A slot has one importer at a time."""
        if self._importer is None or self._importer[0] != node:
            if self._importer is not None:
                self._importer[1].drop()
            self._importer = node, Pipeline(functools.partial(self._owner.open, node))
        return self._importer[1]

    async def _to_owner(self) -> Any:
        """Another owner than before: news must not be awaited of a node that left the cluster."""
        connection = await self._owner.connect()
        before, self._node = self._node, self._owner.first
        if before not in (None, self._node):
            self._tell_moved()
        return connection

    def _lost(self) -> None:
        if self._importer is not None:
            self._importer[1].drop()
        self._tell_broke()

    async def close(self) -> None:
        if self._importer is not None:
            await self._importer[1].close()
        await super().close()


def _host(announced: str) -> str:
    """Empty if a node does not say: then it is the host that was asked."""
    return "" if announced == "?" else announced


@asynccontextmanager
async def _closed_on_error(connection: Any) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        with suppress(*BROKEN):
            await connection.disconnect(nowait=True)
        raise
