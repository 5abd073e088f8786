"""A real Redis Cluster for tests: three masters with a replica each, which can be killed, and whose slots can be migrated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import redis

from tests.support.ports import reserve_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually

MASTERS = 3
SLOTS = 16384
_FAILS_AFTER = "1000"  # milliseconds that a node is silent
_BORDERS = [SLOTS * number // MASTERS for number in range(MASTERS + 1)]


class Node(RedisServer):
    """`number`: the first `MASTERS` begin as masters, and `number` + `MASTERS` as its replica."""

    def __init__(self, number: int, ports: Sequence[int], options: Sequence[str]) -> None:
        self.number, self.id = number, _id(number)
        cluster = (
            "--cluster-enabled",
            "yes",
            "--cluster-config-file",
            "nodes.conf",
            "--cluster-node-timeout",
            _FAILS_AFTER,
        )
        diskless = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
        super().__init__(options=("--port", str(ports[number]), *cluster, *diskless, *options))
        self._port = ports[number]
        lines = [_line(each, ports, myself=each == number) for each in range(len(ports))]
        (self._directory / "nodes.conf").write_text(
            "\n".join([*lines, f"vars currentEpoch {MASTERS} lastVoteEpoch 0\n"])
        )
        self.client = redis.Redis(port=self._port, socket_timeout=5, protocol=2)

    def says(self, *words: str | int) -> str:
        """The answer to ``CLUSTER`` `words`."""
        return self.command("CLUSTER", *words).decode()

    def owns(self, slot: int) -> bool:
        ranges = self.itself()[8:]
        numbers = [[int(n) for n in each.split("-")] for each in ranges if not each.startswith("[")]
        return "master" in self.itself()[2] and any(each[0] <= slot <= each[-1] for each in numbers)

    def itself(self) -> list[str]:
        """What this node says of itself: its id, address, flags, master, and more."""
        (line,) = (line for line in self.says("NODES").splitlines() if "myself" in line)
        return line.split()


class RedisCluster:
    """All nodes of one; `options` are more arguments for each."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        ports = [reserve_port() for _ in range(2 * MASTERS)]  # a node's bus has a port 10,000 above
        self.nodes = [Node(number, ports, options) for number in range(2 * MASTERS)]

    @property
    def url(self) -> str:
        """It names one master."""
        return self.nodes[0].url

    def owner(self, slot: int) -> Node:
        """The node that runs and owns `slot`, once one does."""
        found: list[Node] = []

        def is_found() -> bool:
            found[:] = [node for node in self.running() if node.owns(slot)]
            return len(found) == 1

        eventually(is_found, what=f"one node owns slot {slot}")
        return found[0]

    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.runs and not node.is_paused]

    def until_well(self) -> None:
        """Wait until all nodes run, every slot has an owner that all agree on, and each replica has its master's data."""
        eventually(self._is_well, what="the cluster is well")

    def _is_well(self) -> bool:
        replicas = 0
        for node in self.nodes:
            if not node.runs or "cluster_state:ok" not in node.says("INFO") or "fail" in node.says("NODES"):
                return False
            replicas += b"master_link_status:up" in node.command("INFO", "replication")
        return replicas == MASTERS

    def revive(self) -> None:
        """Start or resume each node that does not run, with what it knew of the cluster."""
        for node in self.nodes:
            if not node.runs:
                node.start()
            elif node.is_paused:
                node.resume()
        self.until_well()

    @contextlib.contextmanager
    def migrating(self, slot: int, target: Node) -> Iterator[Node]:
        """`slot` is on its way from the node that it yields to `target`, with no key moved; on leaving, all have arrived."""
        source = self.owner(slot)
        assert target.says("SETSLOT", slot, "IMPORTING", source.id) == "+OK\r\n"
        assert source.says("SETSLOT", slot, "MIGRATING", target.id) == "+OK\r\n"
        yield source
        while keys := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (
            target,
            source,
            *(n for n in self.running() if n not in (target, source) and "master" in n.itself()[2]),
        ):
            assert node.says("SETSLOT", slot, "NODE", target.id) == "+OK\r\n"

    def migrate(self, slot: int, target: Node) -> None:
        with self.migrating(slot, target):
            pass

    def another_master(self, than: Node) -> Node:
        return next(node for node in self.running() if node is not than and "master" in node.itself()[2])

    def __enter__(self) -> RedisCluster:
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self.until_well()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _id(number: int) -> str:
    return f"{number + 1:x}" * 40


def _line(number: int, ports: Sequence[int], myself: bool) -> str:
    """Of ``nodes.conf``: a node's id, address, flags, master, ping, pong, epoch, link and slots."""
    flags = ["myself"] if myself else []
    place, master = f"127.0.0.1:{ports[number]}@{ports[number] + 10_000}", number % MASTERS
    if number >= MASTERS:
        return f"{_id(number)} {place} {','.join([*flags, 'slave'])} {_id(master)} 0 0 {master + 1} connected"
    slots = f"{_BORDERS[number]}-{_BORDERS[number + 1] - 1}"
    return f"{_id(number)} {place} {','.join([*flags, 'master'])} - 0 0 {number + 1} connected {slots}"
