"""Permits of a pool's workers: no more than cores that idle, and memory that is free."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kcoord.agent.watch import idle_cores as permits_module
from kcoord.agent.watch.idle_cores import Permits

MUCH = 64 << 30  # bytes of memory


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine of eight cores that idle."""
    here = SimpleNamespace(idle=100.0, iowait=0.0)
    monkeypatch.setattr(permits_module, "cores", lambda: 8.0)
    monkeypatch.setattr(permits_module.psutil, "cpu_times_percent", lambda: here)
    monkeypatch.setattr(permits_module.psutil, "cpu_count", lambda: 8)
    return here


def test_permits_are_bounded_by_number_and_end_with_their_connection(machine: SimpleNamespace) -> None:
    permits = Permits(2)
    assert [permits.ask(owner, MUCH) for owner in (1, 2, 3)] == [True, True, False]
    permits.gone(1)
    assert permits.ask(3, MUCH)
    assert permits.ask(2, MUCH), "for its next key"


def test_permits_are_bounded_by_the_cores_that_idle(machine: SimpleNamespace) -> None:
    machine.idle = 25.0  # two of eight
    permits = Permits(100)
    permits.look()
    assert [permits.ask(owner, MUCH) for owner in range(4)] == [True, True, False, False]
    permits.look()  # and the two at work are seen in what idles from now on
    assert permits.ask(2, MUCH)
    machine.idle = 0.0
    permits.look()
    assert not permits.ask(5, MUCH)
    assert permits.ask(0, MUCH), "who is at work already has its own core"


def test_short_memory_takes_a_permit_away(machine: SimpleNamespace) -> None:
    permits = Permits(100)
    assert permits.ask(1, MUCH)
    assert not permits.ask(1, 1 << 29)
    assert not permits.ask(2, 1 << 29)


def test_memory_that_is_granted_and_not_taken_yet_is_not_granted_twice(machine: SimpleNamespace) -> None:
    permits = Permits(100)
    assert [permits.ask(owner, 5 << 29) for owner in range(3)] == [True, True, False]
    permits.look()
    assert permits.ask(2, 5 << 29), "what the others took is missing in what is free by now"
