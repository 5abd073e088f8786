"""What the flights decided, carried out: leases, the local tier and the store.

Disk work runs in threads, the store's apart from the local tier's, so that a stalled NFS server delays neither local
publishing nor a heartbeat.
"""

from __future__ import annotations

import asyncio
import functools
import platform
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from kcoord.agent import flights as fl
from kcoord.artifacts import local
from kcoord.artifacts.manifest import Origin
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, LeaseUnavailable, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.leases.base import Failed, LeaseService, Ready, Wait, Won, await_turn, kept_alive, within
from kcoord.telemetry.events import Notices, log

T = TypeVar("T")


_STORE_TIMEOUT = 60.0  # seconds for one artifact; an NFS server's restart takes 20
_STORE_REST = 60.0
_BUSY_FOR = 2.0  # seconds in which a key that another node compiles is not asked after again by claims that do not wait


class Errands:
    """Runs the actions of one agent's flights, each as a task; `report` gets the actions that follow from a result."""

    def __init__(
        self,
        leases: LeaseService,
        store: Store | None,
        flights: fl.Flights,
        notices: Notices,
        *,
        agent_id: str,
        ttl: float,
        now: Callable[[], float],
        report: Callable[[list[fl.Action]], None],
    ) -> None:
        self._leases, self._store, self._flights, self._notices = leases, store, flights, notices
        self._agent_id, self._ttl, self._now, self._report = agent_id, ttl, now, report
        self._local_io = ThreadPoolExecutor(4, "local-tier")
        self._store_io = ThreadPoolExecutor(8, "store")
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._store_back = 0.0  # when a store that hung is asked again
        self._held: dict[int, AsyncExitStack] = {}  # serial → the renewal of its lease
        self._refused: set[int] = set()  # flights whose lease another node has: their end gives nothing back

    def start(self, action: fl.Errand) -> None:
        """Begin `action`; whatever comes of it goes to `report`."""
        serial = action.serial
        if isinstance(action, fl.AskLease):
            self._asking[serial] = self._run(serial, self._ask(action))
        elif isinstance(action, fl.Look):
            self._run(serial, self._look(action))
        elif isinstance(action, fl.Fetch):
            self._run(serial, self._fetch(action))
        elif isinstance(action, fl.EndLease):
            self._run(serial, self._end(action))
        elif isinstance(action, fl.FailLease):
            self._run(serial, self._fail(action))
        else:
            self._run(serial, self._announce(action))

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    async def drain(self, timeout: float) -> None:
        """Let publishes finish, stop waiting for others, give back what is held."""
        for task in self._asking.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for serial in list(self._held):
            await self._stop_renewing(serial)
        flights = list(self._flights)
        await asyncio.gather(*(self._quietly(self._leases.release(f.key, self._token(f.serial))) for f in flights))
        self._local_io.shutdown(wait=False, cancel_futures=True)
        self._store_io.shutdown(wait=False, cancel_futures=True)

    async def publish_locally(
        self, staging: Path, home: Path, key: CacheKey, compile_seconds: float, origin: Origin
    ) -> local.Artifact:
        """Raises `ArtifactInvalid` or `StoreError`."""
        return await self._in(self._local_io, lambda: local.publish_local(staging, home, key, compile_seconds, origin))

    async def bring_home(self, digest: str, there: Path, home: Path) -> bool:
        """Copy an artifact of the local tier to another home of it. False: it cannot be had there."""

        def copy() -> bool:
            try:
                if local.is_whole(home, digest):
                    return True
                artifact = local.open_artifact(there, digest)
                if artifact is None:
                    return False
                local.install(artifact.manifest, local.read_contents(artifact), home)
            except (ArtifactInvalid, StoreError) as error:
                self._notices.tell(str(error))
                return False
            return True

        return await self._in(self._local_io, copy)

    async def in_store(self, work: Callable[[Store], T], patience: float) -> T | None:
        """What ``work(store)`` returns; None without a store, or if it has not answered for `patience` seconds, now or lately.

        Raises what `work` raises. Not guaranteed: that `work` ends when this does; its thread goes on.
        """
        store = self._store
        if store is None or self._now() < self._store_back:
            return None
        try:
            return await within(patience, self._in(self._store_io, lambda: work(store)))
        except asyncio.TimeoutError:
            self._store_back = self._now() + _STORE_REST
            self._notices.tell(
                f"the store {store.root} has not answered for {patience:g} s; training goes on without it"
            )
            return None

    async def locally(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, run beside the local tier's other disk work."""
        return await self._in(self._local_io, work)

    def _run(self, serial: int, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(errand)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._done, serial))
        return task

    def _done(self, serial: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("an errand failed", exc_info=error)
            self._report(self._flights.derailed(serial))

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _token(self, serial: int) -> str:
        return f"{self._agent_id}.{serial}"

    async def _ask(self, action: fl.AskLease) -> None:
        key, serial = action.key, action.serial
        answer: Won | Ready | Failed | None
        try:
            answer = await await_turn(
                self._leases, key, self._token(serial), platform.node(), void=action.void,
                on_wait=lambda wait: self._waits(key, serial, wait), stays=lambda wait: self._stays(key, serial, wait),
            )  # fmt: skip
            if answer is None:
                return
            if isinstance(answer, Won):
                await self._keep(key, serial)
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): this node coordinates its own ranks only")
            answer = Won(0, coordinated=False)
        finally:
            self._asking.pop(serial, None)
        self._report(self._flights.lease_answered(key, serial, answer, self._now()))

    def _waits(self, key: str, serial: int, wait: Wait) -> None:
        until = self._now() + min(_BUSY_FOR, wait.ttl)
        self._report(self._flights.must_wait(key, serial, wait.holder, until))

    def _stays(self, key: str, serial: int, wait: Wait) -> bool:
        """Whether anybody waits for the other node. If not, the flight has ended: no subscription, and no lease to release."""
        self._refused.add(serial)  # the flight's end begins after this
        self._waits(key, serial, wait)
        flight = self._flights.get(key)
        if flight is None or flight.serial != serial:
            return False
        self._refused.discard(serial)
        return True

    async def _keep(self, key: str, serial: int) -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(kept_alive(self._leases, key, self._token(serial), self._ttl))
        self._held[serial] = stack

    async def _stop_renewing(self, serial: int) -> None:
        stack = self._held.pop(serial, None)
        if stack is not None:
            await stack.aclose()

    async def _look(self, action: fl.Look) -> None:
        home = Path(action.home)
        found, manifest = (
            await self._in(self._local_io, lambda: local.is_whole(home, action.key)),
            None,
        )
        if not found:
            manifest = await self._from_store(action.key, home, None)
        there = action.home if found or manifest else None
        self._report(self._flights.looked(action.key, action.serial, there, self._now(), manifest))

    async def _fetch(self, action: fl.Fetch) -> None:
        home = Path(action.home)
        found = await self._in(self._local_io, lambda: local.is_whole(home, action.key))
        if not found:
            found = await self._from_store(action.key, home, action.manifest) is not None
        self._report(self._flights.fetched(action.key, action.serial, action.home if found else None))

    async def _from_store(self, digest: str, home: Path, announced: str | None) -> str | None:
        """Bring an artifact to `home`; return the SHA-256 of its manifest, None if it is not to be had."""
        store = self._store
        if store is None:
            return None
        if self._now() < self._store_back:
            return None  # it hung a moment ago; a thread that hangs in it is not joined by another for each key
        try:
            fetched = await within(_STORE_TIMEOUT, self._in(self._store_io, lambda: store.fetch(digest, announced)))
            if fetched is None:
                return None
            manifest, contents, stated = fetched
            await self._in(self._local_io, lambda: local.install(manifest, contents, home))
        except asyncio.TimeoutError:
            self._store_back = self._now() + _STORE_REST
            self._notices.tell(
                f"the store {store.root} has not answered for {_STORE_TIMEOUT:g} s; kernels are compiled instead"
            )
            return None
        except (StoreError, ArtifactInvalid) as error:
            self._notices.tell(f"{error}; the kernel is compiled instead")
            return None
        return stated

    async def _end(self, action: fl.EndLease) -> None:
        asking = self._asking.pop(action.serial, None)
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await self._stop_renewing(action.serial)
        if action.serial in self._refused:
            self._refused.discard(action.serial)
            return
        await self._quietly(self._leases.release(action.key, self._token(action.serial)))

    async def _fail(self, action: fl.FailLease) -> None:
        await self._stop_renewing(action.serial)
        await self._quietly(self._leases.fail(action.key, self._token(action.serial), action.log, action.where))

    async def _announce(self, action: fl.Announce) -> None:
        """The lease is renewed until the store has the artifact, so that nobody compiles it meanwhile."""
        key, serial, home = action.key, action.serial, Path(action.home)
        asking = self._asking.pop(serial, None)
        if asking is not None:
            asking.cancel()
        try:
            manifest = action.manifest or await self._into_store(key, home)
        finally:
            await self._stop_renewing(serial)
        if manifest is None:
            await self._quietly(self._leases.release(key, self._token(serial)))
        else:
            await self._quietly(self._leases.ready(key, self._token(serial), manifest))

    async def _into_store(self, digest: str, home: Path) -> str | None:
        """Publish what is at `home`; return the SHA-256 of the store's manifest, None if it did not get there."""
        store = self._store
        if store is None:
            return None

        def publish() -> str | None:
            artifact = local.open_artifact(home, digest)
            if artifact is None:
                return None
            return store.publish(artifact.manifest, local.read_contents(artifact))

        try:
            return await within(_STORE_TIMEOUT, self._in(self._store_io, publish))
        except asyncio.TimeoutError:  # the thread goes on: published late is published
            self._notices.tell(f"the store {store.root} has not answered for {_STORE_TIMEOUT:g} s; training goes on")
        except StoreError as error:
            self._notices.tell(
                f"{error}; training goes on, and the kernel stays on this node",
                about=str(error)[-80:],
            )
        except ArtifactInvalid as error:
            self._notices.tell(f"not published: {error}")
        return None

    async def _quietly(self, command: Awaitable[object]) -> None:
        try:
            await command
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): leases end by their TTL")
