"""What one client host publishes reaches the others: at once, whole, and whoever raced for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.nfs.figures import Figures, spread
from tests.nfs.rig import Job, in_one_bucket

_KEYS = [f"key-{n}" for n in range(30)]


def test_a_waiter_on_another_host_has_what_was_published_though_it_saw_the_name_missing(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    for row, looked in (("a name that B had not looked up", False), ("a name that B had seen missing", True)):
        with job() as here:
            a, b = here.rank("A"), here.rank("B")
            took = []
            for name in _KEYS:
                if looked:
                    assert b.do("claim", name=name)["answer"] == "Lead"  # as leader it looks into the store
                    b.do("give_up", name=name)
                assert a.do("claim", name=name)["answer"] == "Lead"
                waiter = b.begin("claim", name=name)
                here.until_waiting(b, [name])
                published = a.begin("publish", name=name, writer="A")
                assert waiter.value()["answer"] == "Ready", f"{name} is compiled twice"
                assert b.do("read", name=name) == "A"
                assert published.value() is True
                took.append(waiter.ended() - published.began())
            assert here.notices(b) == []
        figures.note(f"publish on A → B has it, {row}, 30 keys", version, spread(took))


def test_no_waiter_is_stuck_by_a_burst_of_renames_into_one_directory(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    """On v3 a client that looks between two renames of one clock tick can take the older state for the newest, for long."""
    names = in_one_bucket(40)
    with job() as here:
        a, b = here.rank("A"), here.rank("B")
        for name in names:
            assert b.do("claim", name=name)["answer"] == "Lead"
            b.do("give_up", name=name)
            assert a.do("claim", name=name)["answer"] == "Lead"
        waiters = [b.begin("claim", name=name) for name in names]
        here.until_waiting(b, names)
        began = a.do("now")
        published = [a.begin("publish", name=name, writer="A") for name in names]
        answers = [waiter.value()["answer"] for waiter in waiters]
        assert all(call.value() for call in published)
        assert answers == ["Ready"] * len(names), "a waiter that is stuck is let go to compile for itself"
        took = [waiter.ended() - call.began() for waiter, call in zip(waiters, published, strict=True)]
        last = max(waiter.ended() for waiter in waiters) - began
        assert {b.do("read", name=name) for name in names} == {"A"}
    figures.note("40 keys renamed into one directory in a burst: stuck waiters", version, f"0 of {len(names)}")
    figures.note("… publish → Ready of each; all of them", version, f"{spread(took)}; {last:.1f} s")


def test_of_two_clients_that_publish_one_key_one_wins_and_all_have_one_writers_whole_artifact(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    """The nodes have Redis databases of their own: both lead, both publish, into one store."""
    wins = {"A": 0, "B": 0}
    with job() as here:
        a, b = here.rank("A"), here.rank("B", redis_url=here.elsewhere())
        c = here.rank("C")
        for name in _KEYS:
            leads = [rank.begin("claim", name=name) for rank in (a, b)]
            assert [lead.value()["answer"] for lead in leads] == ["Lead", "Lead"]
            moment = a.do("now") + 0.15
            racing = [rank.begin("publish_at", moment=moment, name=name, writer=rank.host) for rank in (a, b)]
            assert [race.value() for race in racing] == [True, True]
            assert [rank.do("read", name=name) for rank in (a, b)] == ["A", "B"], "whoever compiled has it already"
            assert c.do("claim", name=name)["answer"] == "Ready"
            winner = c.do("read", name=name)
            found = [rank.do("store_fetch", name=name) for rank in (a, b, c)]
            assert {f["found"] for f in found} == {winner}
            assert len({f["manifest"] for f in found}) == 1
            wins[winner] += 1
        for rank in (a, b):
            assert here.notices(rank) == []
    figures.note("30 races of two clients for one key: won by A, by B, torn", version, f"{wins['A']}, {wins['B']}, 0")


def test_a_reader_meets_no_torn_artifact_while_it_is_replaced_and_removed(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    names, seconds = [f"moving-{n}" for n in range(4)], 10.0
    with job() as here:
        a, readers = here.rank("A"), [here.rank("B"), here.rank("B", "2")]
        reading = [
            readers[0].begin("store_read", names=names, seconds=seconds, announced=True),
            readers[1].begin("store_read", names=names, seconds=seconds),
        ]
        rounds, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            for name in names:
                a.do("store_publish", name=name, writer=f"A{rounds % 10}")
                a.do("store_remove" if rounds % 2 else "store_unlink", name=name)
            rounds += 1
        met: dict[str, int] = {}
        for call in reading:
            for found, count in call.value().items():
                kind = "whole" if found.startswith("A") else found
                met[kind] = met.get(kind, 0) + count
        assert "torn" not in met
        assert met["whole"] > 0
        assert met.keys() <= {"whole", "missing", "invalid"}, met
        here.rig.run(f"rm -rf {here.on_server}/v2/staging/trash-*")
    figures.note(
        "reads while A replaces and removes: whole, missing, refused, torn", version,
        f"{met['whole']}, {met.get('missing', 0)}, {met.get('invalid', 0)}, 0",
    )  # fmt: skip
