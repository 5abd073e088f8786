"""``python -m kcoord.agent``: the agent's process. People start it as ``kcoord agent``, ranks through `kcoord.agent.spawn`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from kcoord.agent.processes import ProcessWatch
from kcoord.agent.server import Agent
from kcoord.agent.spawn import agent_lock, identity_of, unlink_own
from kcoord.artifacts.store import Store
from kcoord.errors import SettingsError, StoreError
from kcoord.leases.base import LeaseService
from kcoord.leases.failover import Failover
from kcoord.leases.local import LocalLeases
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


def main(argv: list[str] | None = None) -> int:
    """Run an agent on an inherited listening socket. Exit code 2: a setting cannot be used."""
    parser = argparse.ArgumentParser("python -m kcoord.agent")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--daemon", action="store_true", help="detach, and end after an idle time")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    args = parser.parse_args(argv)
    if args.daemon and os.fork():
        os._exit(0)  # the rank that started us waits for this process only
    logging.basicConfig(format="%(asctime)s %(message)s" if args.daemon else "%(message)s", level=logging.WARNING)
    try:
        settings = Settings.from_environ()
    except SettingsError as error:
        print(f"kcoord: {error}", file=sys.stderr)
        return 2
    listener = socket.socket(fileno=args.fd)
    code = asyncio.run(run_agent(settings, listener, daemon=args.daemon, parent=args.parent))
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a dead NFS server must not hold us up


async def run_agent(settings: Settings, listener: socket.socket, *, daemon: bool = False, parent: int = 0) -> int:
    """Serve `listener` until SIGTERM, SIGINT, the end of `parent`, or (as a daemon) idleness."""
    notices = Notices()
    store = await _open_store(settings, notices)
    leases, share = _lease_service(settings, store, notices)
    agent = Agent(settings, leases, store, notices, daemon=daemon, tells_clients=not parent, share=share)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    if parent:
        watch = ProcessWatch(parent, agent.stop)
        if not watch.works:
            asyncio.ensure_future(_poll_parent(parent, agent))  # noqa: RUF006 - lives as long as the loop
    path = Path(listener.getsockname())
    identity = identity_of(path)
    await agent.serve(listener)
    if daemon:
        with agent_lock(path, settings.agent_timeout):
            unlink_own(path, identity)
    return 0


async def _poll_parent(parent: int, agent: Agent) -> None:
    while Path(f"/proc/{parent}").exists():
        await asyncio.sleep(1.0)
    agent.stop()


async def _open_store(settings: Settings, notices: Notices) -> Store | None:
    """The store, or None with a notice: a job trains on without it."""
    if settings.store is None:
        return None
    store, loop = Store(settings.store), asyncio.get_running_loop()
    opened: asyncio.Future[None] = loop.create_future()

    def attempt() -> None:
        try:
            store.open()
        except StoreError as error:
            loop.call_soon_threadsafe(_settle, opened, error)
        else:
            loop.call_soon_threadsafe(_settle, opened, None)

    threading.Thread(target=attempt, daemon=True).start()  # a dead NFS server holds it for ever: nobody joins it
    try:
        await asyncio.wait_for(opened, settings.agent_timeout)
    except (StoreError, asyncio.TimeoutError) as error:
        why = str(error) or f"{settings.store}: it does not answer"
        notices.tell(f"the store cannot be used: {why}; artifacts stay on this node")
        return None
    return store


def _settle(opened: asyncio.Future[None], error: StoreError | None) -> None:
    if opened.done():
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)


def _lease_service(settings: Settings, store: Store | None, notices: Notices):  # type: ignore[no-untyped-def]
    here: LeaseService = LocalLeases(settings.lease_ttl, settings.lease_limit, settings.failure_ttl)
    if settings.redis_url is None:
        return here, None
    if store is None:
        notices.tell(
            "KCOORD_REDIS_URL is set but there is no store that artifacts could travel through: "
            "set KCOORD_STORE to a shared directory; until then each node coordinates itself"
        )
        return here, None
    from kcoord.leases.redis import RedisLeases

    there = RedisLeases(
        settings.redis_url, f"kcoord:{settings.namespace}",
        ttl=settings.lease_ttl, limit=settings.lease_limit, failure_ttl=settings.failure_ttl,
    )  # fmt: skip
    return Failover(there, here, notices.tell), there.add_up


if __name__ == "__main__":
    sys.exit(main())
