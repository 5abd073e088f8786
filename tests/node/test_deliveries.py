"""A rank's deliveries: those that an agent never had, those of children, and those that end without a word."""

from __future__ import annotations

import signal
import time

import pytest

from kcoord.protocol.identity import UNNAMED
from kcoord.rank import client as rank_client
from kcoord.rank.client import AgentClient
from kcoord.rank.telemetry import RankTelemetry
from kcoord.report.timeline import load_timeline
from kcoord.telemetry.events import Notices
from tests.support.agents import Node, end_agent, key_of, until
from tests.support.waiting import pause


def telemetry_of(client: AgentClient, node: Node) -> RankTelemetry:
    return RankTelemetry(node.settings, client, Notices(), lambda: True)


def hit(telemetry: RankTelemetry, count: int) -> None:
    for _ in range(count):
        telemetry.spans.hit("test")


def counted(node: Node) -> dict[str, float]:
    with node.wire() as wire:
        wire.hello()
        found: dict[str, float] = wire.ask({"op": "stats"})["figures"]
        return found


def recorded(node: Node) -> dict[str, float]:
    return load_timeline(node.settings, UNNAMED).figures


def test_a_delivery_that_a_paused_agent_answers_late_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_client, "_RETRY_AFTER", 0.1)
    with Node(agent_timeout="1") as node:
        agent = node.start()
        telemetry = telemetry_of(node.client(), node)
        hit(telemetry, 1)
        assert telemetry.deliver(), "there is a connection now"
        hit(telemetry, 2)
        telemetry.spans.add("compile", "ok", key_of("k"), time.perf_counter(), 1.0)
        pause(agent)
        assert not telemetry.deliver()
        hit(telemetry, 4)
        agent.send_signal(signal.SIGCONT)
        until(telemetry.deliver)
        assert not telemetry.spans
        end_agent(agent.pid)
        found = recorded(node)
        assert (found["memory_hits"], found["compiles"], found["requests"]) == (7, 1, 8)


def test_a_delivery_that_an_agent_never_had_is_counted_by_the_next_one() -> None:
    with Node() as node:
        agent = node.start()
        telemetry = telemetry_of(node.client(), node)
        hit(telemetry, 1)
        assert telemetry.deliver()
        end_agent(agent.pid)
        hit(telemetry, 2)
        assert not telemetry.deliver()
        hit(telemetry, 4)
        node.start()
        until(telemetry.deliver)
        assert counted(node)["requests"] == 6, "the agent that lives says what it had"
        until(lambda: recorded(node)["requests"] == 7)


_LOADS = """
import os
import kcoord
coordinator = kcoord.connect()
def get(n):
    coordinator.get_or_compile(key_of(str(n)), lambda staging: (staging / "kernel.bin").write_text("code"))
"""


def test_loads_are_delivered_soon_also_if_nothing_follows() -> None:
    with Node() as node:
        warm = node.rank(_LOADS + "for n in range(40): get(n)\nsay('warm')")
        warm.expect("warm")
        assert warm.end() == 0
        rank = node.rank(_LOADS + "for n in range(40): get(n)\nsay('loaded')\nlisten()\nos._exit(0)")
        rank.expect("loaded")
        until(lambda: counted(node)["local_hits"] == 40)
        rank.tell()
