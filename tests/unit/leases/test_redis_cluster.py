"""Which node of a Redis Cluster is believed, where they contradict each other: no test can bring that about with real ones."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from kcoord.leases.redis_cluster import SlotOwner, SlotPipeline

_A, _B = ("a", 1), ("b", 2)


class _Connection:
    """To a node that names the owner that `says` has for it, and a second node."""

    host, port = "", 0

    def __init__(self, says: dict[tuple[str, int], tuple[str, int]]) -> None:
        self._says = says

    async def connect(self) -> None: ...

    async def disconnect(self, nowait: bool) -> None: ...

    async def send_command(self, *words: str) -> None: ...

    async def read_response(self, disconnect_on_error: bool) -> list[Any]:
        owner = self._says[self.host, self.port]
        nodes = (owner, _B if owner == _A else _A)
        return [[0, 16383, *([host.encode(), port, b"id"] for host, port in nodes)]]


async def test_a_node_that_is_cut_off_from_the_cluster_is_not_believed_for_ever() -> None:
    """Each side of a partition names an owner. The one without a majority answers CLUSTERDOWN, which is a reason for doubt."""
    owner = SlotOwner(lambda: _Connection({_A: _A, _B: _B}), [_A], "name")
    for node in (_A, _B, _A):
        connection = await owner.connect()
        assert (connection.host, connection.port) == node == owner.first
        owner.doubt()


async def test_nodes_that_name_each_other_are_asked_once_each() -> None:
    owner = SlotOwner(lambda: _Connection({_A: _B, _B: _A}), [_A], "name")
    with pytest.raises(RedisConnectionError, match="No node of the Redis Cluster has slot"):
        await owner.connect()


async def test_a_cluster_of_a_million_nodes_is_remembered_in_part_and_the_named_one_stays() -> None:
    class Crowded(_Connection):
        async def read_response(self, disconnect_on_error: bool) -> list[Any]:
            return [[0, 16383, [b"a", 1, b"id"], *([b"n", port, b"id"] for port in range(5000))]]

    owner = SlotOwner(lambda: Crowded({}), [_A], "name")
    await owner.connect()
    assert len(owner._nodes) == 1000
    assert owner._nodes[0] == _A


async def test_a_slot_has_one_importer_at_a_time() -> None:
    pipeline = SlotPipeline(SlotOwner(lambda: _Connection({}), [_A], "name"), lambda: None, lambda: None)
    first = pipeline._to_importer(_A)
    assert pipeline._to_importer(_A) is first
    assert pipeline._to_importer(_B) is not first
    await pipeline.close()
