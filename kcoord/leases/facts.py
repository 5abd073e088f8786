"""Answers that an agent knows without asking, and who waits for news of keys. No I/O.

Facts come from other agents, and from answers to this agent's own questions. They are hints: one that is false or old costs a
fetch that misses, whose `void` asks the service again, or a wait for as long as one lease lasts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from kcoord.latest import Latest
from kcoord.leases.base import RECHECK, Failed, Ready, Wait, Won

_MOST = 20_000  # keys; the oldest facts are forgotten
_SURELY_BEFORE_A_RECHECK = 0.85 * RECHECK  # seconds
_FOLLOWERS_A_SECOND = 80.0
"""A key that somebody compiles is asked for so often by all agents together, however many they are."""


@dataclass(frozen=True)
class _Fact:
    """`answer` None: the key has changed, and nobody has asked since. `number`: of the latest news when it was true."""

    answer: Ready | Wait | None
    number: int
    heard: float


class Facts:
    """The facts of one service, in which a lease lasts for `ttl` seconds. `followers`: how many agents follow the news, as far as
    is known.

    Invariant: while `live`, every change of a key is heard, so that a fact is as good as an answer was. That a key is being
    compiled is asked again all the same, more seldom the more agents there are, since its leader may have died.
    """

    def __init__(self, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl, self._clock = ttl, clock
        self._facts: Latest[str, _Fact] = Latest(_MOST)
        self._events: dict[str, set[asyncio.Event]] = {}
        self._number = 0
        self._live_from = 0
        self.live, self.followers = False, 0

    @property
    def watched(self) -> bool:
        return bool(self._events)

    @property
    def number(self) -> int:
        """Take it before a question, for `learn`."""
        return self._number

    def known(self, key: str, void: str | None = None) -> Ready | Wait | None:
        """The answer that a claim would get, unless it would be READY with the manifest `void`. None: ask."""
        fact = self._facts.get(key)
        if fact is None or fact.answer is None:
            return None
        if isinstance(fact.answer, Ready):
            return fact.answer if fact.answer.manifest != void else None
        age = self._clock() - fact.heard
        left = fact.answer.ttl - age
        patience = max(_SURELY_BEFORE_A_RECHECK, min(self.followers / _FOLLOWERS_A_SECOND, self._ttl))
        return Wait(fact.answer.holder, left) if left > 0 and age < patience else None

    def learn(self, key: str, answer: Won | Ready | Failed | Wait, asked: int) -> None:
        """The service's answer to a question that was asked at the number `asked`. News since then is newer."""
        before = self._facts.get(key)
        if self.live and asked >= self._live_from and (before is None or before.number <= asked):
            self._put(key, answer if isinstance(answer, (Ready, Wait)) else None, asked)

    def hear(self, key: str, answer: Ready | Wait | None) -> None:
        """News. Wakes who watches the key, unless it says that it is being compiled."""
        self._number += 1
        if self.live:
            self._put(key, answer, self._number)
        if not isinstance(answer, Wait):
            for event in self._events.get(key, ()):
                event.set()

    def hear_old(self, key: str, answer: Ready) -> None:
        """News from before the time in which every change is heard."""
        if key not in self._facts:
            self.hear(key, answer)

    def begin(self) -> None:
        """From now on every change is heard."""
        self._number += 1
        self._live_from, self.live = self._number, True

    def forget(self) -> None:
        """Changes may be missed from now on, or have been. Wakes all."""
        self.live = False
        self._facts.clear()
        for events in self._events.values():
            for event in events:
                event.set()

    def watch(self, key: str, event: asyncio.Event) -> None:
        self._events.setdefault(key, set()).add(event)

    def unwatch(self, key: str, event: asyncio.Event) -> None:
        events = self._events.get(key, set())
        events.discard(event)
        if not events:
            self._events.pop(key, None)

    def _put(self, key: str, answer: Ready | Wait | None, number: int) -> None:
        self._facts[key] = _Fact(answer, number, self._clock())
