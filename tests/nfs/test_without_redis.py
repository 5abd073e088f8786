"""No Redis: the nodes elect one compiler by lease files in the store, on a real NFS server."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.nfs.figures import Figures, spread
from tests.nfs.rig import SOON, Job, Rank

_TTL = 6.0


def test_two_nodes_of_two_ranks_compile_each_of_twenty_keys_once(
    job_without_redis: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job_without_redis() as here:
        ranks = {f"{host}{n}": here.rank(host) for host in "AB" for n in (0, 1)}
        names = [f"key-{n}" for n in range(20)]
        compiled: dict[str, str] = {}
        waits: list[float] = []
        began = time.monotonic()
        for name in names:
            asked = {who: rank.begin("claim", name=name) for who, rank in ranks.items()}
            leader = _one_leader(asked)
            assert name not in compiled
            compiled[name] = leader
            published = ranks[leader].begin("publish", name=name, writer=leader)
            assert published.value() is True
            for who, call in asked.items():
                if who != leader:
                    assert call.value()["answer"] == "Ready", f"{name} is compiled twice"
                if who[0] != leader[0]:
                    waits.append(call.ended() - published.began())
        took = time.monotonic() - began
        for name, leader in compiled.items():
            assert {ranks[who].do("read", name=name) for who in ranks} == {leader}
        assert here.notices(ranks["A0"]) == []
        assert here.notices(ranks["B0"]) == []
    figures.note(
        "no Redis, 2 nodes × 2 ranks × 20 keys: compiles",
        version,
        f"{len(compiled)} for {len(names)} keys, {took:.0f} s",
    )
    figures.note("no Redis: publish on one node → the other has it", version, spread(waits))


def _one_leader(asked: dict[str, object]) -> str:
    """Who leads; all the others have no answer yet."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        for who, call in asked.items():
            if call.done and call.value()["answer"] == "Lead":  # type: ignore[attr-defined]
                return who
        time.sleep(0.01)
    raise AssertionError("nobody leads")


def test_waiting_for_a_lease_file_is_gentle_to_the_server(
    job_without_redis: Callable[..., Job], figures: Figures, version: str
) -> None:
    keys, seconds = 20, 20.0
    with job_without_redis() as here:
        a, b = here.rank("A"), here.rank("B")
        names = [f"key-{n}" for n in range(keys)]
        for name in names:
            assert a.do("claim", name=name)["answer"] == "Lead"
        waiting = [b.begin("claim", name=name) for name in names]
        here.until_waiting(b, names)
        rates = {}
        time.sleep(10.0)  # until they poll as seldom as they will
        before = {rank.host: rank.do("rpcs", mount=here.mount) for rank in (a, b)}
        time.sleep(seconds)
        for rank in (a, b):
            after = rank.do("rpcs", mount=here.mount)
            sent = {op: count - before[rank.host].get(op, 0) for op, count in after.items()}
            rates[rank.host] = sum(sent.values()) / keys / seconds
            print(rank.host, {op: count for op, count in sent.items() if count})
        for name in names:
            assert a.do("publish", name=name, writer="A") is True
        assert {call.value()["answer"] for call in waiting} == {"Ready"}
        assert rates["B"] < 20, "RPCs for each key that is waited for, each second"
    figures.note(
        "no Redis: RPCs per key and second, of a host that waits; of one that leads", version,
        f"{rates['B']:.1f}; {rates['A']:.1f}",
    )  # fmt: skip


def test_without_redis_too_a_leaders_host_that_vanishes_is_replaced_within_the_ttl(
    job_without_redis: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job_without_redis(lease_ttl=str(_TTL)) as here:
        a, b = here.rank("A"), here.rank("B")
        assert a.do("claim", name="kernel")["answer"] == "Lead"
        waiter = b.begin("claim", name="kernel")
        here.until_waiting(b, ["kernel"])
        time.sleep(_TTL)  # B has seen it renewed
        with here.rig.unplugged("A"):
            gone = b.do("now")
            assert waiter.value()["answer"] == "Lead"
            took = waiter.ended() - gone
            late = a.begin("publish", name="kernel", writer="A")
            assert late.value() is True, "a host on its own uses what it compiled"
            assert b.do("publish", name="kernel", writer="B") is True
            here.until_published(["kernel"])
        here.until_tried("A", "kernel", within=3 * SOON)
        c = here.rank("C")
        assert c.do("claim", name="kernel")["answer"] == "Ready"
        assert c.do("read", name="kernel") == "B", "the first one stays"
        assert [rank.do("read", name="kernel") for rank in (a, b)] == ["A", "B"]
    assert took < _TTL + 0.5 + 1.5, "the TTL, and the slowness of an emulated host"
    figures.note(f"A, which leads, unplugged: B leads after (TTL {_TTL:g} s, lease files)", version, spread([took]))


def test_no_clock_of_a_host_matters(
    job_without_redis: Callable[..., Job], job: Callable[..., Job], version: str
) -> None:
    """B's wall clock is a day ahead, C's a day behind, and B's monotonic clock is another one than A's."""
    apart = "unshare --time --fork --kill-child --monotonic 864000 --boottime 864000"
    for make in (job, job_without_redis):
        with make() as here:
            ranks: list[Rank] = [
                here.rank("A"),
                here.rank("B", before=apart, variables={"NFS_CLOCK": "86400"}),
                here.rank("C", variables={"NFS_CLOCK": "-86400"}),
            ]
            for n, leader in enumerate(ranks * 2):
                name, others = f"key-{n}", [rank for rank in ranks if rank is not leader]
                assert leader.do("claim", name=name)["answer"] == "Lead"
                waiting = [rank.begin("claim", name=name) for rank in others]
                for rank in others:
                    here.until_waiting(rank, [name])
                assert leader.do("publish", name=name, writer=leader.host) is True
                assert [call.value()["answer"] for call in waiting] == ["Ready", "Ready"]
                assert {rank.do("read", name=name) for rank in ranks} == {leader.host}
            assert [here.notices(rank) for rank in ranks] == [[], [], []]
