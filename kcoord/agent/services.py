"""The agent's services, built in order: each knows those before it. The table of requests: the service that answers each.

The way of a claim: `connections` parses it, this table knows who answers, `claims` enters it into the `flights`, `acquisition`
carries out the actions on leases and artifacts, `claims` answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from kcoord.agent.autotuning import Choices, SharedMeasurements
from kcoord.agent.chores.chore import Chore, Chores, DiskThread
from kcoord.agent.chores.packing import PackWriter
from kcoord.agent.chores.profiles import Profiles
from kcoord.agent.chores.retention import LocalRetention, StoreRetention
from kcoord.agent.chores.sweeping import Sweeper
from kcoord.agent.chores.timelines import Timelines
from kcoord.agent.claims import Claims
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.expectations import Expectations
from kcoord.agent.packs import UsedArtifacts
from kcoord.agent.pools import Pools
from kcoord.agent.tiers import Tiers
from kcoord.artifacts.choices import store_decided
from kcoord.artifacts.signing import OFF, Trust
from kcoord.artifacts.store import Store
from kcoord.errors import SettingsError
from kcoord.leases.base import LeaseService
from kcoord.packs.recipe import Recipe
from kcoord.protocol import messages
from kcoord.settings import Settings, is_profile_name
from kcoord.telemetry.events import Notices

if TYPE_CHECKING:
    from kcoord.agent.metrics import Metrics

Handler = Callable[[Connection, int, Any], messages.Answer | Awaitable[messages.Answer] | None]
"""``handler(connection, request id, message)`` returns the answer, or an awaitable of it. None: it calls `Connections.answer`,
now or later. Raises `ProtocolError`, which ends the connection.
"""


class Services:
    """The services of the agent `agent_id`. `tells_clients`: see `Connections`."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseService,
        store: Store | None,
        notices: Notices,
        agent_id: str,
        metrics: Metrics | None,
        *,
        tells_clients: bool,
    ) -> None:
        self._settings, self._metrics, local_dir = settings, metrics, settings.local_dir
        root, trust = (store.root, store.trust) if store is not None else (None, OFF)
        self.connections = Connections(agent_id, notices, tells_clients, metrics, settings)
        self.expectations = Expectations(settings.hedge, settings.hedge_after)
        self.used_artifacts = UsedArtifacts(local_dir)
        self.tiers = Tiers(
            store, local_dir, notices,
            expectations=self.expectations, used=self.used_artifacts, required=settings.policy == "require",
        )  # fmt: skip
        self.timelines = Timelines(root, local_dir, agent_id, notices)
        self.claims = Claims(
            settings, agent_id, self.connections, leases, self.tiers, notices,
            expectations=self.expectations, timelines=self.timelines,
        )  # fmt: skip
        sweeper = Sweeper(root, local_dir, notices, self.claims.flights.homes)
        self.choices = Choices(self.tiers, local_dir, settings.agent_timeout, notices)
        self.profiles = Profiles(root, local_dir, notices, trust, patience=settings.agent_timeout / 2)
        self.packing = PackWriter(
            store, settings.recorded_as, self.tiers.packs, self.used_artifacts, leases, agent_id,
            settings.lease_ttl, notices,
        )  # fmt: skip
        self._retention = (
            StoreRetention(root, settings, leases, agent_id, notices, trust),
            LocalRetention(local_dir, settings.local_max_size, root, notices, trust),
        )
        with_chores = (self.claims, self.profiles, self.packing, self.timelines, sweeper, *self._retention)
        self.chores = Chores(*(part.chores for part in with_chores), signing_keys(trust, notices))
        self.pools = Pools(settings.pool_workers, self.connections, self.profiles, self.take_in, notices)
        self.handlers: dict[type[messages.Request], Handler] = {
            messages.Claim: self._claim,
            messages.Publish: self._publish,
            messages.Fail: self.claims.fail,
            messages.GiveUp: self.claims.give_up,
            messages.Lookup: self._lookup,
            messages.Offer: self.choices.offer,
            messages.Measure: SharedMeasurements().measure,
            messages.Record: self.profiles.record,
            messages.Deliver: self._deliver,
            messages.Profile: self.profiles.bring,
            messages.Announce: self._announce,
            messages.Join: self.pools.join,
            messages.Take: self.pools.take,
            messages.Next: self.pools.next,
            messages.Stats: self.timelines.stats,
        }

    def answer(self, connection: Connection, request: int, message: messages.Request) -> None:
        answer = self.handlers[type(message)](connection, request, message)
        if isinstance(answer, messages.Answer):
            self.connections.answer(connection, request, answer)
        elif answer is not None:
            self.connections.answer_later(connection, request, answer)

    def gone(self, connection: Connection) -> None:
        self.pools.gone(connection.id)
        self.claims.gone(connection)
        if not self.connections:  # the user's next command finds what the last one recorded
            self.packing.job_ended()
            for chore in self.profiles.chores:
                chore.run_soon()

    def gauges(self) -> dict[str, float]:
        """For the metrics: what the store and this node hold, as far as it is known."""
        in_store, on_node = self._retention
        return in_store.gauges() | on_node.gauges()

    def take_in(self, recipes: Collection[Recipe]) -> None:
        """Take the compile times and the choices that a profile recorded."""
        self.expectations.learn_all(recipes)
        self.choices.learn(recipes)

    # Requests that concern several services.

    def _claim(self, connection: Connection, request: int, message: messages.Claim) -> None:
        ahead = self.pools.compiling(connection)
        self.claims.claim(connection, request, message, ahead)
        self.pools.asked(connection, message.recipe)
        self.used_artifacts.asked(message.digest, str(message.home))

    def _publish(self, connection: Connection, request: int, message: messages.Publish) -> Awaitable[messages.Answer]:
        self.pools.published(connection, message.key, message.compile_seconds)
        return self.claims.publish(connection, request, message)

    def _lookup(self, connection: Connection, request: int, message: messages.Lookup) -> Awaitable[messages.Answer]:
        self.used_artifacts.asked(message.digest, str(store_decided(self._settings.local_dir, message.digest)))
        self.used_artifacts.stored(message.digest)  # by the rank that decides it, if nobody has
        return self.choices.lookup(connection, request, message)

    def _deliver(self, connection: Connection, _: int, message: messages.Deliver) -> messages.Answer:
        spans = self.timelines.add(connection.who, message)
        if self._metrics is not None:
            self._metrics.delivered(spans)
        used = [span.key for span in spans if span.key]
        if not connection.who.pool:
            self.pools.used(connection.who.job, used)
            self.used_artifacts.loaded(used)
        return messages.Done()

    def _announce(self, connection: Connection, request: int, message: messages.Announce) -> Awaitable[messages.Answer]:
        if message.profile is not None and is_profile_name(message.profile):
            self.tiers.packs.begin(message.profile)
        return self.pools.announce(connection, request, message)


def signing_keys(trust: Trust, notices: Notices, every: float = 30.0) -> list[Chore]:
    """The chore that reads the key file of `trust` again when it has changed: keys may be rotated while a job runs.

    It looks each `every` seconds. A file that cannot be used is told, and the known keys stay. Not guaranteed: how soon new keys
    are seen; the kubelet itself takes a minute or two to bring a new Secret.
    """

    def look() -> None:
        try:
            trust.read_again()
        except SettingsError as error:
            notices.tell(f"{error}; the keys that were read before stay in use", about="signing keys")

    thread = DiskThread("signing-keys")
    return [Chore("signing keys", thread, thread.doing(look), notices, first=every, every=every)] if trust.path else []
