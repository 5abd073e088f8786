"""``python -m kcoord.agent``: the agent's process. Users start it with ``kcoord agent``, ranks through `kcoord.rank.spawn`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kcoord.agent.process_watch import ProcessWatch
from kcoord.agent.server import ENDS_WITHIN, Agent
from kcoord.agent.store_breaker import opened
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import SettingsError, StoreError
from kcoord.files.private import make_private
from kcoord.leases.base import LeaseService
from kcoord.leases.breaker import Breaker
from kcoord.leases.local import LocalLeases
from kcoord.protocol.endpoint import identity_of, unlink_own
from kcoord.secret_files import is_left_out
from kcoord.settings import SECRET_FILES, Settings, unknown_variables, variable
from kcoord.telemetry.events import Notices, log_as, log_to_stderr

if TYPE_CHECKING:
    from kcoord.agent.http_server import HttpService


def main(argv: list[str] | None = None) -> int:
    """Run an agent on an inherited listening socket. Exit code 2: a setting cannot be used, or a directory is others' too."""
    parser = argparse.ArgumentParser("python -m kcoord.agent")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--daemon", action="store_true", help="detach, and end after an idle time")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    args = parser.parse_args(argv)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a thread that blocks SIGTERM may have started us
    if args.daemon and os.fork():
        os._exit(0)  # the rank that started us waits for this process alone
    log_to_stderr("%(asctime)s %(message)s" if args.daemon else "%(message)s")
    try:
        settings = Settings.from_environ()
        Trust.of(settings)
        settings.redis_address()
        make_private(settings.local_dir)
    except SettingsError as error:
        print(f"kcoord: {error}", file=sys.stderr)
        return 2
    except StoreError as error:
        if not error.passing:  # a disk that takes nothing now may do so later
            print(f"kcoord: KCOORD_LOCAL_DIR={error}", file=sys.stderr)
            return 2
    listener = socket.socket(fileno=args.fd)
    code = asyncio.run(run_agent(settings, listener, daemon=args.daemon, parent=args.parent))
    logging.shutdown()
    with suppress(OSError):  # the disk that holds its log is full
        sys.stderr.flush()
    os._exit(code)  # without a wait for threads, which a dead NFS server may hold


async def run_agent(settings: Settings, listener: socket.socket, *, daemon: bool = False, parent: int = 0) -> int:
    """Serve `listener` until SIGTERM, SIGINT, SIGHUP (but under nohup), the end of `parent` and of all other launchers, or, as a
    daemon, until the agent is idle. The process then ends within `ENDS_WITHIN` seconds.

    Raises `SettingsError` if signatures are required and the keys cannot be used.
    """
    settings = settings.as_mounted()
    _allow_many_files()
    log_as(settings.log_format)
    notices = Notices()
    for line in (*_left_out(), *unknown_variables()):
        notices.tell(line)
    root, trust = settings.store_root, Trust.of(settings)
    store = Store(root, trust, notices.tell, creates=settings.store_create) if root is not None else None
    if store is not None:
        # the rank that started us waits for its first answer, and gives up after its timeout
        await opened(store, settings.agent_timeout / 3, notices)
    leases = _lease_service(settings, store, notices)
    metrics = page = None
    served: dict[str, HttpService] = {}  # their modules are heavy
    if settings.metrics is not None:
        from kcoord.agent.http_server import HttpService
        from kcoord.agent.metrics import Metrics

        metrics = Metrics()
        served["metrics"] = HttpService("metrics", "KCOORD_METRICS", settings.metrics, metrics.application(), notices)
    if settings.page is not None:
        from kcoord.agent.http_server import HttpService
        from kcoord.agent.status_page import StatusPage

        page = StatusPage(settings.page.rpartition(":")[0].strip("[]"))
        served["page"] = HttpService("status page", "KCOORD_PAGE", settings.page, page, notices)
    agent = Agent(settings, leases, store, notices, daemon=daemon, tells_clients=not parent, owned=parent > 0, metrics=metrics,
                  page=page, serves=served)  # fmt: skip
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, agent.stop)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # the script's; Slurm sends them to every process of a step
        signal.signal(number, signal.SIG_IGN)
    orphaned = asyncio.Event()

    def end_with_parent() -> None:
        orphaned.set()
        if not agent.hand_over():
            agent.stop()

    if parent:
        watch = ProcessWatch(parent, end_with_parent)
        if not watch.works:
            asyncio.ensure_future(_poll_parent(parent, end_with_parent))  # noqa: RUF006 - lives as long as the loop
    path = Path(listener.getsockname())
    identity = identity_of(path)
    for_sure = asyncio.create_task(_end_for_sure(agent))
    await agent.serve(listener)
    for_sure.cancel()
    # else the socket's name belongs to our supervisor, which may start the next agent on it
    if daemon or orphaned.is_set() or agent.handed_over:
        unlink_own(path, identity, settings.agent_timeout)
    # the loop's end waits for these threads, of which one may ask a dead name server
    loop.set_default_executor(ThreadPoolExecutor(1))
    return 0


async def _end_for_sure(agent: Agent) -> None:
    """End the process by a thread, in time: the loop may hang in a write to a log that nobody reads, or whose disk hangs."""
    await agent.stopped()
    end = threading.Timer(ENDS_WITHIN, os._exit, (0,))
    end.daemon = True
    end.start()


def _left_out() -> Iterator[str]:
    """A notice for each optional key that a mounted Kubernetes Secret lacks."""
    meanings = {
        "redis_url_file": "lease files in the store elect who compiles",
        "signing_key_file": "nothing is signed, and the store's artifacts are used unsigned (KCOORD_TRUST=require refuses that)",
    }
    for name, means in meanings.items():
        text = os.environ.get(variable(name))
        if text and not os.environ.get(variable(SECRET_FILES[name])) and is_left_out(Path(text)):
            yield f"{variable(name)}={text}: the Secret that is mounted there has no such key: {means}"


def _allow_many_files() -> None:
    """Raise the limit on open files: a client takes one or two, and the limit that a rank leaves us is often 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # "unlimited" may be more than the kernel allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _poll_parent(parent: int, ended: Callable[[], None]) -> None:
    while Path(f"/proc/{parent}").exists():
        await asyncio.sleep(1.0)
    ended()


def _lease_service(settings: Settings, store: Store | None, notices: Notices) -> LeaseService:
    """Redis; while it cannot be used, lease files in the store, or above some 64 nodes this node alone; while these cannot be
    used, this node alone. A service without its setting is left out.
    """
    ttl, limit, failure_ttl = settings.lease_ttl, settings.lease_limit, settings.failure_ttl
    alone = LocalLeases(ttl, limit, failure_ttl)
    try:
        url = settings.redis_address()
    except SettingsError as error:  # the file has changed since `main` read it
        notices.tell(f"Redis cannot be used: {error}")
        url = None
    if store is None:
        if url is not None:
            notices.tell(
                f"{settings.redis_setting} is set but there is no store that artifacts could travel through: "
                "set KCOORD_STORE to a shared directory; until then each node coordinates itself"
            )
        return alone
    from kcoord.leases.files import FileLeases

    files = FileLeases(store.root, ttl=ttl, limit=limit, failure_ttl=failure_ttl)
    without_redis = Breaker(files, alone, notices.tell)
    if url is None:
        return without_redis
    from kcoord.leases.redis import RedisLeases

    try:
        redis = RedisLeases(
            url, settings.namespace, ttl=ttl, limit=limit, failure_ttl=failure_ttl, setting=settings.redis_setting
        )
    except SettingsError as error:
        notices.tell(f"Redis cannot be used: {error}")
        return without_redis
    return Breaker(redis, without_redis, notices.tell, alone=alone)


if __name__ == "__main__":
    sys.exit(main())
