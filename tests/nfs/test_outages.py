"""The server stops, forgets, or a host's cable is pulled, while artifacts are published and fetched: the job goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from tests.nfs.figures import Figures, spread
from tests.nfs.rig import SOON, Job, Rank

_OUTAGE = 20.0  # seconds
_LONG_OUTAGE = 75.0  # longer than an agent waits for the store
_TTL = 6.0


@contextlib.contextmanager
def answering(*ranks: Rank) -> Iterator[list[float]]:
    """The seconds that each agent took to answer, asked several times a second while the block runs."""
    took: list[float] = []
    over = threading.Event()

    def ask(rank: Rank) -> None:
        while not over.wait(0.3):
            took.append(rank.begin("status").seconds())

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        yield took
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_server_that_stops_for_twenty_seconds_costs_that_time_and_its_grace_period(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job() as here:
        a, b = here.rank("A"), here.rank("B")
        before = [f"before-{n}" for n in range(3)]
        during = [f"during-{n}" for n in range(3)]
        for name in before + during:
            assert a.do("claim", name=name)["answer"] == "Lead"
        for name in before:
            a.do("publish", name=name, writer="A")
        here.until_published(before)
        waiting = [b.begin("claim", name=name) for name in during]
        here.until_waiting(b, during)
        with answering(a, b) as took:
            with here.rig.server_stopped():
                stopped = time.monotonic()
                published = [a.begin("publish", name=name, writer="A") for name in during]
                looking = [b.begin("claim", name=name) for name in before]
                new = [a.begin("claim", name=f"new-{n}") for n in range(3)]
                assert all(call.value() for call in published), "what is compiled is used here, store or not"
                at_once = [call.seconds() for call in published]
                time.sleep(max(0.0, stopped + _OUTAGE - time.monotonic()))
            back = a.do("now")
            asked = dict(zip(during + before, waiting + looking, strict=True))
            answers = {name: call.value(2 * SOON)["answer"] for name, call in asked.items()}
            assert [call.value(2 * SOON)["answer"] for call in new] == ["Lead"] * 3
            late = max(call.ended() for call in waiting + looking + new) - back
        again = [name for name, answer in answers.items() if answer == "Lead"]
        if version == "v3":
            assert again == []
        if again:  # after a restart a v4 server may make its clients wait for 90 s more, and an agent waits for 60 s
            for rank in (a, b):
                here.until_store_is_used(rank)
        for name, answer in answers.items():
            assert answer in ("Ready", "Lead")
            assert b.do("publish", name=name, writer="B") if name in again else b.do("read", name=name) == "A"
        for n in range(3):
            assert a.do("publish", name=f"new-{n}", writer="A") is True
        c = here.rank("C")
        here.until_published([*before, *during, "new-0", "new-1", "new-2"])
        for name in [*before, *during, "new-0", "new-1", "new-2"]:
            assert c.do("claim", name=name)["answer"] == "Ready"
            assert c.do("read", name=name) in (("A", "B") if name in again else ("A",))
        for rank in (a, b):  # a fault, and its end
            assert len(here.notices(rank)) == (2 if again else 0), here.notices(rank)
    figures.note("server stopped 20 s: publishes on A answered (local copy)", version, spread(at_once))
    figures.note("… fetches and waits on B answered, after it was back", version, f"{late:.1f} s at the latest")
    figures.note("… of 6, compiled again", version, str(len(again)))
    figures.note("… an agent's answers to its ranks meanwhile", version, spread(took))


def test_a_server_that_is_gone_for_longer_than_an_agent_waits_is_told_once_and_used_again(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job() as here:
        a, b = here.rank("A"), here.rank("B")
        names = [f"key-{n}" for n in range(12)]
        for name in names:
            assert a.do("claim", name=name)["answer"] == "Lead"
        waiting = [b.begin("claim", name=name) for name in names[:6]]
        here.until_waiting(b, names[:6])
        with answering(a, b) as took:
            with here.rig.server_stopped():
                stopped = time.monotonic()
                published = [a.begin("publish", name=name, writer="A") for name in names]
                assert all(call.value() for call in published)
                time.sleep(max(0.0, stopped + _LONG_OUTAGE - time.monotonic()))
            # at once with the server's return its end may be told, too
            told = [[line for line in here.notices(rank) if "is back" not in line] for rank in (a, b)]
            answers = [call.value(2 * SOON)["answer"] for call in waiting]
            longest = max(call.seconds() for call in waiting)
        assert set(answers) <= {"Ready", "Lead"}
        for name, answer in zip(names, answers, strict=False):  # let go ahead, they compile, and that is used
            if answer == "Lead":
                assert b.do("publish", name=name, writer="B") is True
        assert longest < 60.0 + SOON
        assert len(told[0]) == 1, told
        assert "has not answered" in told[0][0]
        assert len(told[1]) <= 1, told
        here.until_store_is_used(a)
        c = here.rank("C")
        late = 0  # by threads that went on, or by who compiled it again; what was given up stays on its node
        for name in names:
            if c.do("claim", name=name)["answer"] == "Ready":
                assert c.do("read", name=name) in ("A", "B")
                late += 1
            else:
                c.do("give_up", name=name)
        assert a.do("claim", name="after")["answer"] == "Lead"
        assert a.do("publish", name="after", writer="A") is True
        assert c.do("claim", name="after")["answer"] == "Ready"
    figures.note(
        "server stopped 75 s: lines told by A and by B for 12 keys", version, f"{len(told[0])} and {len(told[1])}"
    )
    figures.note("… in the store all the same, afterwards", version, f"{late} of {len(names)}")
    figures.note("… waiters on B answered after", version, f"{longest:.1f} s at the latest")
    figures.note("… an agent's answers to its ranks meanwhile (75 s)", version, spread(took))


def test_an_agent_that_starts_while_the_server_is_stopped_answers_its_ranks_and_publishes_later(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job() as here:
        b = here.rank("B")
        with here.rig.server_stopped():
            a = here.rank("A")
            first = a.begin("claim", name="kernel")
            assert first.value()["answer"] == "Lead"
            assert a.do("publish", name="kernel", writer="A") is True
        took = first.seconds()
        here.until_store_is_used(a)
        assert a.do("claim", name="later")["answer"] == "Lead"
        assert a.do("publish", name="later", writer="A") is True
        assert b.do("claim", name="later", within=2 * SOON)["answer"] == "Ready"
        assert b.do("read", name="later") == "A"
        assert len(here.notices(a)) == 2, here.notices(a)
    figures.note("agent started while the server is stopped: its first claim answered", version, spread([took]))


def test_a_rename_whose_reply_was_lost_before_a_restart_counts_as_done(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    """The client sends it again, to a server that has forgotten it and answers ENOENT: the target holds our own token."""
    with job() as here:
        a, b = here.rank("A"), here.rank("B")
        gate = f"{here.local('A')}/gate"
        for attempt in range(5):  # a client that sent anything else in the last moment does not get the rename through
            name = f"kernel-{attempt}"
            assert b.do("claim", name=name)["answer"] == "Lead"
            b.do("give_up", name=name)
            assert a.do("claim", name=name)["answer"] == "Lead"
            waiter = b.begin("claim", name=name)
            here.until_waiting(b, [name])
            here.rig.run(f"touch {gate}/hold")
            published = a.begin("publish", name=name, writer="A")
            here.rig.run(f"for i in $(seq 600); do test -e {gate}/held && exit 0; sleep 0.05; done; exit 1")
            with here.rig.replies_lost_until_a_restart(f"rm {gate}/hold {gate}/held"):
                done = here.rig.run(f"sleep 5; ls -d {here.on_server}/{here.home(name)} || true").strip()
                assert not waiter.done
            back = a.do("now")
            assert published.value() is True
            assert waiter.value(2 * SOON)["answer"] == "Ready", "what was published is told"
            took = waiter.ended() - back
            assert b.do("read", name=name) == "A"
            if done:
                break
        assert done, "no rename got through to the server"
        assert [here.notices(rank) for rank in (a, b)] == [[], []]
    figures.note("rename done, reply lost, server restarted: B has it, after the restart", version, spread([took]))


def test_replies_lost_anywhere_in_a_publish_and_a_restart_leave_whole_artifacts_and_no_rubble(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job() as here:
        a = here.rank("A")
        names = [f"key-{n}" for n in range(24)]
        for name in names:
            assert a.do("claim", name=name)["answer"] == "Lead"
        with answering(a) as took:
            published = [a.begin("publish", name=name, writer="A") for name in names]
            with here.rig.replies_lost_until_a_restart():
                time.sleep(4.0)
            assert all(call.value() for call in published)
            with contextlib.suppress(AssertionError):  # it fails below, with what was told
                here.until_published(names, within=3 * SOON)
        here.until_served("C")
        c = here.rank("C")
        ready = [name for name in names if c.do("claim", name=name, tier="homes")["answer"] == "Ready"]
        assert {c.do("read", name=name) for name in ready} == {"A"}
        told = here.notices(a)
        if version == "v4" and told:  # it may have been in its grace period for 90 s, and an agent waits for 60 s
            assert len(told) == 2, told
            assert len(ready) > 0, "what was given up stays on its node, and what threads went on with is whole"
        else:
            assert (ready, told) == (names, [])
    figures.note(
        "replies lost in the midst of 24 publishes, a restart: published, told",
        version,
        f"{len(ready)} of 24, {len(told)}",
    )
    figures.note("… A's answers to its ranks meanwhile", version, spread(took))


def test_a_leaders_host_that_vanishes_is_replaced_within_the_ttl_and_its_late_publish_is_harmless(
    job: Callable[..., Job], figures: Figures, version: str
) -> None:
    with job(lease_ttl=str(_TTL)) as here:
        a, b = here.rank("A"), here.rank("B")
        assert a.do("claim", name="kernel")["answer"] == "Lead"
        waiter = b.begin("claim", name="kernel")
        here.until_waiting(b, ["kernel"])
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
        assert here.notices(b) == []
    assert took < _TTL + 0.5 + 2.0, "the TTL, and the slowness of an emulated host"
    figures.note(f"A, which leads, unplugged: B leads after (TTL {_TTL:g} s, Redis)", version, spread([took]))
