"""``kcoord doctor``: check the setup, and name a remedy for each fault."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil
from rich.markup import escape
from rich.table import Column, Table

import kcoord
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import CLOSE_IT, OPEN_TO_ALL, Store, open_to_all
from kcoord.artifacts.store_root import check_is_store
from kcoord.backends.compiler import Compiler
from kcoord.backends.registry import compilers, is_installed, obstacle
from kcoord.backends.trials import examine
from kcoord.cgroups import cores
from kcoord.cli.console import Console
from kcoord.cli.options import WHERE, agent_status, print_json, subcommand
from kcoord.default_dir import why_temporary
from kcoord.errors import KcoordError, LeaseUnavailable, SettingsError, StoreError
from kcoord.files.faults import has_no_inodes, store_errors
from kcoord.files.private import make_tier
from kcoord.leases.base import LeaseService, probe
from kcoord.leases.files import FileLeases
from kcoord.leases.redis import RedisLeases
from kcoord.mounts import LOCAL, NETWORK, file_system_of, try_library
from kcoord.ranks import nodes_of
from kcoord.settings import Settings
from kcoord.telemetry.events import plain

_LITTLE_SPACE = 1 << 30  # bytes


@dataclass(frozen=True)
class Finding:
    """`state` is ok, warn or fail; `remedy` is empty when there is nothing to do."""

    what: str
    state: str
    finding: str
    remedy: str = ""


@subcommand("doctor", *WHERE)
def command(settings: Settings, as_json: bool) -> None:
    """Check the store, Redis, the socket and the compilers, and name a remedy for each fault. Exit code 1 if a check failed."""
    settings = settings.as_mounted()
    findings = [f for check in _CHECKS for f in check(settings)]
    if as_json:
        print_json({"findings": [asdict(f) for f in findings], "settings": settings.redacted()})
    else:
        table = Table("", "what", *(Column(name, overflow="fold") for name in ("finding", "remedy")))  # no path is cut
        for f in findings:
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[f.state]
            table.add_row(f"[{colour}]{f.state}[/]", f.what, escape(f.finding), escape(f.remedy))
        Console().print(table)
    sys.exit(1 if any(f.state == "fail" for f in findings) else 0)


def _kcoord(settings: Settings) -> Iterator[Finding]:
    if settings.disable:
        yield Finding("kcoord", "warn", "off, by KCOORD_DISABLE", "unset KCOORD_DISABLE to use it")
    if not settings.move:
        remedy = "unset KCOORD_MOVE to share them between GPUs"
        yield Finding("kcoord", "warn", "graphs of torch.compile are not moved to another GPU, by KCOORD_MOVE", remedy)
    yield Finding("kcoord", "ok", f"{kcoord.__version__}, Python {sys.version.split()[0]}")
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding("kernel", "ok", "pidfd: a killed compiler is known at once")
    except OSError as error:
        remedy = "use Linux 5.3 or newer; until then only the end of its socket shows it, and a forked child can hold that open"
        yield Finding("kernel", "warn", f"no pidfd ({error.strerror})", remedy)


def _compilers(settings: Settings) -> Iterator[Finding]:
    needed: dict[str, tuple[int, ...]] = {}
    for compiler in compilers():
        for package, oldest in compiler.packages.items():
            needed[package] = max(oldest, needed.get(package, ()))
    for package, oldest in needed.items():
        yield _package(package, oldest)
    obstacles = {compiler: obstacle(compiler, settings, os.environ) for compiler in compilers()}
    yield from _examined(compiler for compiler, found in obstacles.items() if found is None)
    for compiler, found in obstacles.items():
        if found is not None:
            yield Finding(compiler.name, "warn", *found)


def _package(package: str, oldest: tuple[int, ...]) -> Finding:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Finding(package, "ok", "not installed")
    number = tuple(int(p) for p in version.split("+")[0].split(".")[: len(oldest)])
    if number < oldest:
        remedy = f"upgrade to {'.'.join(map(str, oldest))} or newer; kcoord leaves this one alone"
        return Finding(package, "warn", version, remedy)
    return Finding(package, "ok", version)


def _examined(usable: Iterable[Compiler]) -> Iterator[Finding]:
    """Parts of the installed compilers that kcoord does not hook, and the outcome of their trials."""
    chosen = {each.name: modules for each in usable if (modules := [*filter(is_installed, each.modules)])}
    with ThreadPoolExecutor(max(1, int(cores()))) as pool:
        for name, found in zip(chosen, pool.map(examine, chosen, chosen.values()), strict=True):
            for what, fault in found.faults:
                remedy = "each rank does this for itself; a newer kcoord may know this release"
                yield Finding(plain(what), "warn", plain(fault), remedy)
            if found.seconds is not None and not found.faults:
                yield Finding(name, "ok", f"a trial passed: compiled, published and loaded in {found.seconds:.1f} s")


def _local_dir(settings: Settings) -> Iterator[Finding]:
    what = "local directory"
    try:
        make_tier(settings.local_dir)
        with store_errors(settings.local_dir):
            try_library(settings.local_dir)
        yield Finding(what, "ok", f"{settings.local_dir} ({file_system_of(settings.local_dir)})")
        yield from _directory(what, settings.local_dir)
    except KcoordError as error:
        yield Finding(what, "fail", str(error), "set KCOORD_LOCAL_DIR to a directory of your own on local disk")
        return
    places = {"KCOORD_LOCAL_DIR": settings.local_dir}
    for compiler in compilers():
        places |= compiler.tiers(os.environ)
    for name, place in places.items():
        kind = file_system_of(place)
        if kind in NETWORK:
            remedy = f"set {name} to a directory on local disk; nodes share the store"
            yield Finding(what, "warn", f"{place} is on {kind}", remedy)
    if why := why_temporary(settings.local_dir):
        remedy = "set KCOORD_LOCAL_DIR to a directory on local disk that outlives the job, or KCOORD_STORE"
        yield Finding(
            what, "ok" if settings.store else "warn", f"temporary, and perhaps the job's alone: {why}", remedy
        )


def _store(settings: Settings) -> Iterator[Finding]:
    if settings.store is None:
        remedy = "set KCOORD_STORE to a shared directory if the job has several nodes, or to keep kernels for later"
        yield Finding("store", "ok", "none: artifacts stay on this node", remedy)
        return
    try:
        store = Store(settings.store_root or settings.store, Trust.of(settings), creates=settings.store_create)
        uuid = store.open()
        refused, took = _probed(store)
        doubted = open_to_all(store.root)
    except OSError as error:
        yield Finding("store", "fail", f"{settings.store}: {error.strerror}", "look at its server and its mount")
        return
    except KcoordError as error:
        yield Finding(
            "store", "fail", str(error), "see the finding; meanwhile jobs run, and artifacts stay on each node"
        )
        return
    kind = file_system_of(settings.store)
    place = f"{store.root} ({kind}, {uuid[:8]})"
    if refused is not None:
        yield Finding("store", "warn", f"{place}: artifacts are used, and none are published", refused.remedy)
    else:
        yield Finding("store", "ok", f"{place}: a file was published in {took:.0f} ms")
    has_redis = settings.redis_url is not None or settings.redis_url_file is not None
    if kind in LOCAL and (has_redis or nodes_of() > 1):
        remedy = "name a directory that all nodes share, or look at its mount"
        yield Finding("store", "warn", f"{store.root} is on {kind}: of several nodes each would have its own", remedy)
    for path in doubted:
        yield Finding("store", "warn", f"{path}: {OPEN_TO_ALL}", CLOSE_IT)
    yield from _directory("store", settings.store)


def _trust(settings: Settings) -> Iterator[Finding]:
    try:
        trust = Trust.of(settings)
    except SettingsError as error:
        yield Finding("trust", "fail", str(error), "see the finding; an agent with these settings does not start")
        return
    if trust.keys:
        yield Finding("trust", "ok", f"{trust.policy}: the key {trust.roles()}")
    else:
        yield Finding("trust", "ok", f"{trust.policy}: nothing in the store is signed by us")


def _probed(store: Store) -> tuple[StoreError | None, float]:
    """Publish a probe. Returns the reason if the store takes no artifact now, and milliseconds."""
    started = time.perf_counter()
    try:
        store.check()
    except StoreError as error:
        return error, 0.0
    return None, (time.perf_counter() - started) * 1000


def _directory(what: str, path: Path) -> Iterator[Finding]:
    usage = psutil.disk_usage(str(path))
    if usage.free < _LITTLE_SPACE:
        yield Finding(what, "warn", f"{usage.free >> 20} MiB free", "free space: a job fills a few hundred MiB")
    if has_no_inodes(path):
        yield Finding(what, "warn", "no inodes left", "remove files")


def _redis(settings: Settings) -> Iterator[Finding]:
    try:
        url = settings.redis_address()
    except SettingsError as error:
        yield Finding("Redis", "fail", str(error), "see the finding; an agent with these settings does not start")
        return
    if url is None:
        if settings.store is None:
            found = "none, and no store: each node elects its own compiler"
        else:
            found = "none: lease files in the store elect one compiler; other nodes notice it within 2 s"
        yield Finding("Redis", "ok", found, "set KCOORD_REDIS_URL or KCOORD_REDIS_URL_FILE for several nodes")
        return
    if settings.store is None:
        remedy = "set KCOORD_STORE to a directory that all nodes share"
        yield Finding("Redis", "fail", "set, but artifacts have no store to travel through", remedy)
    given = settings.redis_setting
    try:
        took = _try_lease(
            lambda: RedisLeases(url, settings.namespace, ttl=5.0, limit=5.0, failure_ttl=1.0, setting=given)
        )
    except (LeaseUnavailable, SettingsError) as error:
        yield Finding("Redis", "fail", str(error), f"see the finding, and {given}")
        return
    yield Finding("Redis", "ok", f"a lease was taken and released in {took:.1f} ms")


def _try_lease(make: Callable[[], LeaseService]) -> float:
    """Milliseconds to take and release a lease. Raises `LeaseUnavailable`."""

    async def attempt() -> float:
        leases = make()
        try:
            await probe(leases)  # it connects
            started = time.perf_counter()
            await probe(leases)
            return (time.perf_counter() - started) * 1000
        finally:
            await leases.close()

    return asyncio.run(attempt())


def _agent(settings: Settings) -> Iterator[Finding]:
    status = agent_status(settings)
    if status is None:
        yield Finding("agent", "ok", f"none at {settings.socket_path}: the first rank, or a launcher, starts it")
        return
    agent = f"pid {status['pid']}, {status['clients']} clients, coordinated by {status['coordinates']}"
    yield Finding("agent", "ok", agent)
    if status["version"] != kcoord.__version__:
        remedy = "stop it with 'kcoord agent --stop'; the next job starts one of this version"
        yield Finding("agent", "warn", f"it is version {status['version']}, this is {kcoord.__version__}", remedy)
    for notice in status["notices"]:
        yield Finding("agent", "warn", notice, "see the finding")


def _lease_files(settings: Settings) -> Iterator[Finding]:
    if settings.store is None:
        return
    root = settings.store_root or settings.store
    try:
        check_is_store(root)
    except StoreError:  # a finding of `_store`
        return
    times = {"ttl": settings.lease_ttl, "limit": settings.lease_limit, "failure_ttl": settings.failure_ttl}
    has_redis = settings.redis_url is not None or settings.redis_url_file is not None
    try:
        took = _try_lease(lambda: FileLeases(root, **times))
    except LeaseUnavailable as error:
        remedy = "see the finding; without Redis each node then elects its own compiler"
        yield Finding("lease files", "warn" if has_redis else "fail", str(error), remedy)
        return
    role = "they coordinate while Redis is away" if has_redis else "they coordinate"
    yield Finding("lease files", "ok", f"{role}: a lease was taken and released in {took:.1f} ms")


_CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    _kcoord, _compilers, _local_dir, _store, _trust, _redis, _lease_files, _agent,
)  # fmt: skip
