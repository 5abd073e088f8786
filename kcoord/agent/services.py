"""The agent's services, built in order: each knows those before it, and none is handed a way back up."""

from __future__ import annotations

from collections.abc import Collection

from kcoord.agent.choices import Choices
from kcoord.agent.chores.chore import Chores
from kcoord.agent.chores.local_retention import LocalRetention
from kcoord.agent.chores.packing import PackWriter
from kcoord.agent.chores.profiles import Profiles
from kcoord.agent.chores.signing_keys import signing_keys
from kcoord.agent.chores.store_retention import StoreRetention
from kcoord.agent.chores.sweeping import Sweeper
from kcoord.agent.chores.timelines import Timelines
from kcoord.agent.claims import Claims
from kcoord.agent.connections import Connections, Observer
from kcoord.agent.expectations import Expectations
from kcoord.agent.launchers import Launchers
from kcoord.agent.measurements import SharedMeasurements
from kcoord.agent.pools import Pools
from kcoord.agent.tiers import Tiers
from kcoord.agent.used_artifacts import UsedArtifacts
from kcoord.agent.watch.stalls import StallWatch
from kcoord.artifacts.signing import OFF
from kcoord.artifacts.store import Store
from kcoord.leases.base import LeaseService
from kcoord.packs.recipe import Recipe
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


class Services:
    """The services of the agent `agent_id`. `owned`: a launcher started it."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseService,
        store: Store | None,
        notices: Notices,
        agent_id: str,
        observer: Observer,
        *,
        tells_clients: bool,
        owned: bool,
    ) -> None:
        self.connections = Connections(
            agent_id, notices, tells_clients, observer, welcome=lambda who: who.expected.check(settings)
        )
        self.expectations = Expectations(settings.hedge, settings.hedge_after)
        self.used_artifacts = UsedArtifacts(settings.local_dir)
        self.tiers = Tiers(
            store, settings.local_dir, notices,
            learn=self.expectations.learn, in_store=self.used_artifacts.stored, observer=observer,
            required=settings.policy == "require",
        )  # fmt: skip
        root, trust = (store.root, store.trust) if store is not None else (None, OFF)
        self.timelines = Timelines(root, settings.local_dir, agent_id, notices)
        self.sweeper = Sweeper(root, settings.local_dir, notices)
        self.claims = Claims(
            settings, agent_id, self.connections, leases, self.tiers, notices,
            lost=self.timelines.lost, expectations=self.expectations, sweeper=self.sweeper,
        )  # fmt: skip
        stalls = StallWatch(
            settings.stall_seconds, self.claims.compiling, self.claims.stalled, notices,
            works=self.claims.works, every=min(settings.stall_seconds, settings.max_wait) / 4,
        )  # fmt: skip
        self.choices = Choices(self.tiers, settings.local_dir, settings.agent_timeout, notices)
        self.measurements = SharedMeasurements()
        self.profiles = Profiles(root, settings.local_dir, notices, trust)
        self.packing = PackWriter(
            store, settings.recorded_as, self.tiers.packs, self.used_artifacts, leases, agent_id,
            settings.lease_ttl, notices,
        )  # fmt: skip
        in_store = StoreRetention(root, settings, leases, agent_id, notices, trust)
        on_node = LocalRetention(settings.local_dir, settings.local_max_size, root, notices, trust)
        with_chores = (stalls, self.profiles, self.packing, self.timelines, self.sweeper, in_store, on_node)
        self.chores = Chores(*(part.chores for part in with_chores), signing_keys(trust, notices))
        self.pools = Pools(settings.pool_workers, self.connections, self.profiles, self.take_in, notices)
        self._retention = in_store, on_node
        self.launchers = Launchers(owned)

    def gauges(self) -> dict[str, float]:
        """For the metrics: what the store and this node hold, as far as it is known."""
        in_store, on_node = self._retention
        return in_store.gauges() | on_node.gauges()

    def take_in(self, recipes: Collection[Recipe]) -> None:
        """Take the compile times and the choices that a profile recorded."""
        self.expectations.learn_all(recipes)
        self.choices.learn(recipes)
