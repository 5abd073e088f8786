"""A rank's deliveries: one that is sent again, since its answer came too late, is counted once, by the job and by the metrics."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kcoord.agent.chores import deliveries
from kcoord.agent.chores.deliveries import Deliveries
from kcoord.errors import ProtocolError
from kcoord.protocol.messages import Deliver, parse_request
from kcoord.rank import connection_pool
from kcoord.rank.client import AgentClient
from kcoord.rank.recorder import Recorder
from kcoord.report import span_reader
from kcoord.telemetry import span_files
from kcoord.telemetry.events import Notices
from kcoord.telemetry.ledger import Ledger
from tests.support.agents import Node, end_agent, key_of, until
from tests.support.scrape import Scraped, address_of
from tests.support.waiting import pause


def recorder_of(client: AgentClient, node: Node) -> Recorder:
    return Recorder(node.settings, client, Notices(), lambda: True)


def counted(node: Node) -> dict[str, float]:
    with node.wire() as wire:
        wire.hello()
        found: dict[str, float] = wire.ask({"op": "stats"})["counters"]
        return found


def test_a_delivery_that_a_paused_agent_answers_late_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "_RETRY_AFTER", 0.1)
    with Node(agent_timeout="1", metrics="0") as node:
        agent = node.start()
        address = address_of(node)
        recorder = recorder_of(node.client(), node)
        recorder.counters.add(requests=1, compiles=1)
        assert recorder.deliver(), "there is a connection now"
        recorder.counters.add(requests=2, compiles=2)
        recorder.spans.add("compile", "ok", key_of("k"), time.perf_counter(), 1.0)
        pause(agent)
        assert not recorder.deliver()
        recorder.counters.add(requests=4, compiles=4)
        agent.send_signal(signal.SIGCONT)
        until(recorder.deliver)
        assert not recorder.counters.undelivered()
        assert (counted(node)["requests"], counted(node)["compiles"]) == (7, 7)
        assert Scraped(address).sum("kcoord_requests_total") == 7
        end_agent(agent.pid)
        (line,) = span_files.roots(None, node.directory)[0].glob(f"*/*{span_files.SUFFIX}")
        assert sum(len(spans) for _, spans in span_reader.read(line).deliveries) == 1


def test_a_delivery_that_an_agent_never_had_is_counted_by_the_next_one() -> None:
    with Node() as node:
        agent = node.start()
        recorder = recorder_of(node.client(), node)
        recorder.counters.add(requests=1)
        assert recorder.deliver()
        end_agent(agent.pid)
        recorder.counters.add(requests=2)
        assert not recorder.deliver()
        recorder.counters.add(requests=4)
        node.start()
        until(recorder.deliver)
        assert counted(node)["requests"] == 7


def test_a_forked_child_s_deliveries_are_its_own() -> None:
    with Node() as node:
        node.start()
        rank = node.rank(
            """
            from kcoord.rank.coordinator import Coordinator
            from kcoord.settings import Settings
            import os
            coordinator = Coordinator(Settings.from_environ())
            coordinator.counters.add(requests=1)
            coordinator._recorder.deliver()
            if os.fork() == 0:
                coordinator.counters.add(requests=2)
                assert coordinator._recorder.deliver()
                os._exit(0)
            os.wait()
            coordinator.counters.add(requests=4)
            assert coordinator._recorder.deliver()
            say("delivered")
            """,
            PYTHONWARNINGS="ignore",
        )
        rank.expect("delivered")
        assert counted(node)["requests"] == 7


_LOADS = """
import os
import kcoord
coordinator = kcoord.connect()
def get(n):
    coordinator.get_or_compile(key_of(str(n)), lambda staging: (staging / "kernel.bin").write_text("code"))
"""


def test_children_that_end_without_a_word_are_counted() -> None:
    """By ``os._exit``, as a pool's workers and Ray's do: no function that is registered for the exit runs."""
    with Node() as node:
        rank = node.rank(
            _LOADS
            + """
get(0)
for number in range(8):
    if number == 1:
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    if os.fork() == 0:
        get(number % 2)  # from memory, or from this node
        os._exit(0)
for number in range(7):
    os.wait()
say("ended")
"""
        )
        rank.expect("ended")
        sums = counted(node)
        assert (sums["requests"], sums["compiles"]) == (9, 2)


def test_loads_are_delivered_soon_also_if_nothing_follows() -> None:
    with Node() as node:
        warm = node.rank(_LOADS + "for n in range(40): get(n)\nsay('warm')")
        warm.expect("warm")
        assert warm.end() == 0
        rank = node.rank(_LOADS + "for n in range(40): get(n)\nsay('loaded')\nlisten()\nos._exit(0)")
        rank.expect("loaded")
        until(lambda: counted(node)["local_hits"] == 40)
        rank.tell()


def test_an_agent_that_does_not_answer_holds_up_one_request_and_no_other() -> None:
    """A request that ends without the agent must not wait for its time-out again and again."""
    asked_by: list[threading.Thread] = []

    class Hung(AgentClient):
        def deliver(self, *delivery: object) -> bool:  # type: ignore[override]
            asked_by.append(threading.current_thread())
            return False

    with Node() as node:
        recorder = recorder_of(Hung(node.settings, Notices()), node)
        for _ in range(5):
            recorder.found_in_memory("triton")
        assert asked_by == [threading.main_thread()]
        until(lambda: len(asked_by) == 2)
        assert asked_by[1] is not threading.main_thread()
        recorder.close()
        assert Ledger(node.directory, "").total(None)["counters"]["memory_hits"] == 5


def test_a_number_is_known_by_its_process_and_a_delivery_without_one_counts() -> None:
    arrived = Deliveries()
    assert arrived.new(Deliver({}, process="a", number=1))
    assert arrived.new(Deliver({}, process="b", number=1))
    assert arrived.new(Deliver({}, process="a", number=2))
    assert not arrived.new(Deliver({}, process="a", number=1))
    assert not arrived.new(Deliver({}, process="a", number=2))
    assert arrived.new(Deliver({}))
    assert arrived.new(Deliver({}))


@pytest.mark.parametrize(
    "message", [{"process": "x" * 65, "number": 1}, {"process": 1, "number": 1}, {"process": "a", "number": "1"}]
)
def test_a_delivery_that_is_numbered_wrongly_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        parse_request({"op": "deliver", "id": 1, "counters": {}, **message})


def test_the_memory_of_processes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "_REMEMBERED", 3)
    arrived = Deliveries()
    for process in "abcd":
        assert arrived.new(Deliver({}, process=process, number=1))
    assert not arrived.new(Deliver({}, process="d", number=1))
    assert arrived.new(Deliver({}, process="a", number=1)), "it delivered longest ago"
