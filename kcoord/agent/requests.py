"""The agent's table of requests: the service that answers each, and others that hear of it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from kcoord.agent.connections import Connection, Observer
from kcoord.agent.services import Services
from kcoord.artifacts.choices import store_decided
from kcoord.protocol import messages
from kcoord.settings import Settings, is_profile_name

Handler = Callable[[Connection, int, Any], messages.Answer | Awaitable[messages.Answer] | None]
"""``handler(connection, request id, message)`` returns the answer, or an awaitable of it. None: it calls `Connections.answer`,
now or later. Raises `ProtocolError`, which ends the connection.
"""


class Requests:
    """Answers an agent's clients, by its `services`. ``status()``, ``stop()`` and ``hand_over()`` are the agent's own."""

    def __init__(
        self,
        settings: Settings,
        services: Services,
        observer: Observer,
        status: Callable[[], dict[str, Any]],
        stop: Callable[[], None],
        hand_over: Callable[[], bool],
    ) -> None:
        self._settings, self._agent, self._observer, self._end = settings, services, observer, stop
        self._handlers: dict[type[messages.Request], Handler] = {
            messages.Claim: self._claim,
            messages.Publish: self._publish,
            messages.Fail: self._agent.claims.fail,
            messages.GiveUp: self._agent.claims.give_up,
            messages.Lookup: self._lookup,
            messages.Offer: lambda connection, _, message: self._agent.choices.offer(connection.who, message),
            messages.Measure: lambda connection, _, message: self._agent.measurements.answer(
                (connection.pid, connection.who.pid), message
            ),
            messages.Record: self._record,
            messages.Deliver: self._deliver,
            messages.Profile: lambda _, __, message: self._agent.profiles.bring(
                message.profile, settings.agent_timeout / 2
            ),
            messages.Announce: self._announce,
            messages.Join: self._agent.pools.join,
            messages.Take: self._agent.pools.take,
            messages.Next: self._agent.pools.next,
            messages.Status: lambda _, __, ___: messages.Facts(status()),
            messages.Stats: lambda _, __, message: messages.Facts(self._agent.timelines.stats(message.job)),
            messages.Stop: self._stop,
            messages.Attend: self._attend,
            messages.Leave: self._leave,
            messages.HandOver: lambda _, __, ___: messages.Left(last=not hand_over(), ends=0),
        }

    def answer(self, connection: Connection, request: int, message: messages.Request) -> None:
        answer = self._handlers[type(message)](connection, request, message)
        if isinstance(answer, messages.Answer):
            self._agent.connections.answer(connection, request, answer)
        elif answer is not None:
            self._agent.connections.answer_later(connection, request, answer)

    def gone(self, connection: Connection) -> None:
        self._agent.pools.gone(connection.id)
        self._agent.claims.gone(connection)
        if self._agent.launchers.gone(connection.id):
            self._end()
        if not self._agent.connections:  # the user's next command finds what the last one recorded
            self._agent.packing.job_ended()
            for chore in self._agent.profiles.chores:
                chore.run_soon()

    def _claim(self, connection: Connection, request: int, message: messages.Claim) -> None:
        ahead = self._agent.pools.compiling(connection)
        self._agent.claims.claim(connection, request, message, ahead)
        self._agent.pools.asked(connection, message.recipe)
        self._agent.used_artifacts.asked(message.digest, str(message.home))

    def _announce(self, connection: Connection, request: int, message: messages.Announce) -> Awaitable[messages.Answer]:
        if message.profile is not None and is_profile_name(message.profile):
            self._agent.tiers.packs.begin(message.profile)
        return self._agent.pools.announce(connection, request, message)

    def _publish(self, connection: Connection, request: int, message: messages.Publish) -> Awaitable[messages.Answer]:
        self._agent.pools.published(connection, message.key, message.compile_seconds)
        return self._agent.claims.publish(connection, request, message)

    def _lookup(self, connection: Connection, _: int, message: messages.Lookup) -> Awaitable[messages.Answer]:
        self._agent.used_artifacts.asked(message.digest, str(store_decided(self._settings.local_dir, message.digest)))
        self._agent.used_artifacts.stored(message.digest)  # by the rank that decides it, if nobody has
        return self._agent.choices.lookup(message)

    def _record(self, connection: Connection, _: int, message: messages.Record) -> messages.Answer:
        self._agent.profiles.add(message.profile, message.recipes)
        return messages.Done()

    def _deliver(self, connection: Connection, _: int, message: messages.Deliver) -> messages.Answer:
        spans = self._agent.timelines.add(connection.who, message)
        self._observer.delivered(spans)
        used = [span.key for span in spans if span.key]
        if not connection.who.pool:
            self._agent.pools.used(connection.who.job, used)
            self._agent.used_artifacts.loaded(used)
        return messages.Done()

    def _stop(self, connection: Connection, _: int, message: messages.Stop) -> messages.Answer:
        self._end()
        return messages.Done()

    def _attend(self, connection: Connection, _: int, message: messages.Attend) -> messages.Answer:
        self._agent.connections.must_live(connection)
        self._agent.launchers.attend(connection.id)
        return messages.Done()

    def _leave(self, connection: Connection, _: int, message: messages.Leave) -> messages.Answer:
        last = self._agent.launchers.leaves(connection.id)
        return messages.Left(last, ends=os.getpid() if last and self._agent.launchers.handed_over else 0)
