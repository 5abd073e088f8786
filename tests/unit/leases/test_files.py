"""Lease files: the whole interface, and what only files, and several processes, can suffer."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
from filelock.version import version_tuple as FILELOCK

from kcoord.artifacts.store import Store
from kcoord.errors import LeaseUnavailable
from kcoord.leases import lease_files
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Unleased, Wait, await_turn, probe
from kcoord.leases.files import FileLeases
from kcoord.leases.lease_files import KeyFiles
from kcoord.testing.leases import BOUND, TTL, LeaseConformance, some_key, waiting, won
from tests.support.interpose import Interposer
from tests.unit.leases.other_agent import OtherAgent

_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}
_KEY = "ab" * 32


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Store(tmp_path / "store").open()
    return tmp_path / "store"


@asynccontextmanager
async def leases_in(store: Path, **times: float) -> AsyncIterator[FileLeases]:
    service = FileLeases(store, **{**_TIMES, **times})
    try:
        yield service
    finally:
        await service.close()


def path_of(store: Path, suffix: str, key: str = _KEY) -> Path:
    path = store / "v2" / "leases" / key[:2] / f"{key}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def litter(store: Path) -> list[str]:
    """Markers, and files that were to get another name."""
    return [str(p) for p in (store / "v2").rglob("*") if not p.is_dir() and p.suffix != ".outcome"]


def marker_of_another_host(ttl: float, mode: str = "lease") -> bytes:
    return f"filelock/2\npid={os.getpid()}\nhost=vanished\nmode={mode}\ntoken={'0' * 32}\nduration={ttl!r}\n".encode()


class TestFileLeases(LeaseConformance):
    @pytest.fixture(autouse=True)
    def directory(self, store: Path) -> None:
        self.store = store

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        async with leases_in(self.store, **times) as service:
            yield service
            deadline = time.monotonic() + BOUND  # what was cancelled in a thread ends a moment later
            while any(known.events or known.users for known in service._keys.values()):
                assert time.monotonic() < deadline, "a watch was left behind"
                await asyncio.sleep(0.01)
        assert not litter(self.store)


# Several processes.


def test_processes_lead_one_after_the_other_and_never_two_at_once(store: Path) -> None:
    with OtherAgent(store) as a, OtherAgent(store) as b, OtherAgent(store) as c:
        for agent in (a, b, c):
            agent.start("lead", _KEY, 12)
        led = sorted(interval for agent in (a, b, c) for interval in agent.answer())
    assert len(led) == 36
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(led)), "two led at once"
    assert not litter(store)


def test_ready_reaches_waiters_in_other_processes(store: Path) -> None:
    with OtherAgent(store) as leader, OtherAgent(store) as waiter:
        assert leader.ask("acquire", _KEY, "a", "host-a")[0] == "Lease"
        assert waiter.ask("acquire", _KEY, "b", "host-b")[:2] == ["Wait", socket.gethostname()]
        waiter.start("await", _KEY, "b", "host-b")
        leader.ask("ready", _KEY, "a", "m")
        assert waiter.answer()[:2] == ["Ready", "m"]
    assert not litter(store)


def test_a_killed_holder_on_this_host_is_followed_long_before_its_ttl(store: Path) -> None:
    with OtherAgent(store, ttl=60.0) as holder, OtherAgent(store, ttl=60.0) as waiter:
        assert holder.ask("keep", _KEY, "a", "host-a")[0] == "Lease"
        waiter.start("await", _KEY, "b", "host-b")
        killed = holder.signal(signal.SIGKILL)
        kind, _, _, moment = waiter.answer()
        assert kind == "Lease"
        assert moment - killed < BOUND
        assert waiter.ask("release", _KEY, "b")
    assert not litter(store)


async def test_a_holder_whose_host_has_vanished_is_followed_when_its_ttl_has_run_out(store: Path) -> None:
    async def scenario() -> float:
        key, ttl = some_key(), 1.0
        async with leases_in(store, ttl=ttl) as service:
            began = time.monotonic()
            path_of(store, "lease", key).write_bytes(marker_of_another_host(ttl))
            waits: list[Wait] = []
            answer = await asyncio.wait_for(
                await_turn(service, key, "b", "host-b", stays=lambda w: waits.append(w) is None), BOUND
            )
            took = time.monotonic() - began
            assert isinstance(answer, Lease)
            assert waits[0].holder == "vanished"
            assert took > ttl
            return took

    took = [await scenario()]
    while min(took) > 1.0 + 0.5:  # on a busy machine
        assert len(took) < 3, took
        took.append(await scenario())


async def test_a_vanished_holder_is_followed_where_names_cannot_be_exchanged(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS refuses RENAME_EXCHANGE, and there filelock alone leaves an expired marker where it is, for ever."""
    monkeypatch.setattr("filelock._soft.exchange_supported", lambda: False, raising=False)
    async with leases_in(store, ttl=TTL) as service:
        path_of(store, "lease").write_bytes(marker_of_another_host(TTL))
        lease = await asyncio.wait_for(await_turn(service, _KEY, "b", "host-b"), BOUND)
        assert isinstance(lease, Lease)
        assert await lease.renew()
        await lease.release()
    assert not litter(store)


def test_a_stopped_holder_is_followed_a_ttl_after_its_last_heartbeat_and_its_late_ready_counts(store: Path) -> None:
    ttl = 1.5
    with OtherAgent(store, ttl) as holder, OtherAgent(store, ttl) as waiter:
        holder.ask("keep", _KEY, "a", "host-a")
        waiter.start("await", _KEY, "b", "host-b")
        time.sleep(1.4)  # a few heartbeats
        holder.signal(signal.SIGSTOP)
        age = time.time() - path_of(store, "lease").stat().st_mtime
        stopped = time.monotonic()
        kind, _, _, moment = waiter.answer()
        assert kind == "Lease"
        assert moment - stopped + age > ttl - 0.1, "a holder was robbed whose lease had not run out"
        holder.signal(signal.SIGCONT)
        assert holder.ask("renew", _KEY, "a") is False
        assert holder.ask("release", _KEY, "a") is False
        assert waiter.ask("renew", _KEY, "b") is True
        holder.ask("ready", _KEY, "a", "late")
        assert waiter.ask("renew", _KEY, "b") is False
        assert waiter.ask("acquire", _KEY, "c", "host-c") == ["Ready", "late"]
    assert not litter(store)


@pytest.mark.parametrize(
    ("step", "free_at"),
    [
        pytest.param(0.0, 36.0, id="the file system's clock says when it was touched"),
        pytest.param(600.0, 35.0, id="which, set forward, is believed back to the look before"),
        pytest.param(-600.0, 37.0, id="and set back, up to the look that found it changed"),
    ],
)
def test_a_marker_that_was_touched_between_two_looks_expires_a_ttl_after_that(
    store: Path, monkeypatch: pytest.MonkeyPatch, step: float, free_at: float
) -> None:
    """Looks at 0 s, 5 s and 7 s, a touch at 6 s; the file system's clock is 1,000 s ahead of this process's."""
    now, ahead = 0.0, 1000.0
    monkeypatch.setattr(lease_files, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(lease_files, "file_system_now", lambda staging: now + ahead)
    marker = path_of(store, "lease")
    files = KeyFiles(marker.parent, store / "v2" / "staging", _KEY, 30.0, 30.0)
    marker.write_bytes(marker_of_another_host(30.0))
    os.utime(marker, (ahead, ahead))
    for now in (0.0, 5.0):
        assert files.attempt(None) == Wait("vanished", 30.0 - now)
    os.utime(marker, (ahead + 6.0, ahead + 6.0))
    now = 7.0
    assert files.attempt(None) == Wait("vanished", 28.0), "it is worth another look 30 s after the one at 5 s"
    ahead += step
    now = 35.0
    if free_at > now:
        assert files.attempt(None) == Wait("vanished", pytest.approx(free_at - now))
        now = free_at
    assert files.attempt(None) is None
    files.release()


def test_a_lease_that_its_process_does_not_renew_ends_for_other_processes_too(store: Path) -> None:
    """filelock's heartbeat would go on for ever."""
    with OtherAgent(store, TTL) as holder, OtherAgent(store, TTL) as waiter:
        holder.ask("acquire", _KEY, "a", "host-a")
        assert waiter.ask("await", _KEY, "b", "host-b")[0] == "Lease"
        assert holder.ask("renew", _KEY, "a") is False


def test_a_marker_that_is_touched_as_it_is_moved_aside_is_put_back(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(lease_files, "time", SimpleNamespace(monotonic=lambda: now))
    marker, left = path_of(store, "lease"), KeyFiles._left
    files = KeyFiles(marker.parent, store / "v2" / "staging", _KEY, 30.0, 30.0)
    marker.write_bytes(marker_of_another_host(30.0))
    os.utime(marker, (1, 1))
    assert isinstance(files.attempt(None), Wait)

    def meanwhile(self: KeyFiles, known: lease_files._Marker) -> float:
        found = left(self, known)
        os.utime(marker)
        return found

    monkeypatch.setattr(KeyFiles, "_left", meanwhile)
    now = 31.0
    assert isinstance(files.attempt(None), Wait)
    assert marker.read_bytes() == marker_of_another_host(30.0)
    assert litter(store) == [str(marker)]


def test_a_marker_that_cannot_be_put_back_costs_a_second_leader_and_not_the_use_of_lease_files(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux refuses a link to what another user owns, and some file systems know none."""
    now = 0.0
    monkeypatch.setattr(lease_files, "time", SimpleNamespace(monotonic=lambda: now))
    marker, left = path_of(store, "lease"), KeyFiles._left
    files = KeyFiles(marker.parent, store / "v2" / "staging", _KEY, 30.0, 30.0)
    marker.write_bytes(marker_of_another_host(30.0))
    os.utime(marker, (1, 1))
    assert isinstance(files.attempt(None), Wait)

    def meanwhile(self: KeyFiles, known: lease_files._Marker) -> float:
        found = left(self, known)
        os.utime(marker)
        return found

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(KeyFiles, "_left", meanwhile)
    monkeypatch.setattr(os, "link", refuse)
    now = 31.0
    assert files.attempt(None) is None
    files.release()
    assert litter(store) == []


def test_who_looks_at_a_marker_calls_back_what_an_nfs_server_delegated_of_it(store: Path) -> None:
    """The server delegates by a lease of the kernel's. A vanished holder could not give it back, and nobody remove the file."""
    marker, called_back = path_of(store, "lease"), threading.Event()
    marker.write_bytes(marker_of_another_host(30.0))
    before = signal.signal(signal.SIGIO, lambda number, frame: called_back.set())
    delegated = os.open(marker, os.O_RDONLY)
    try:
        fcntl.fcntl(delegated, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        files = KeyFiles(marker.parent, store / "v2" / "staging", _KEY, 30.0, 30.0)
        assert isinstance(files.attempt(None), Wait)
        assert called_back.wait(10)
    finally:
        os.close(delegated)
        signal.signal(signal.SIGIO, before)


def test_an_outcome_that_is_written_while_the_lease_is_taken_ends_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, take = path_of(store, "lease"), KeyFiles._take
    ours, theirs = (KeyFiles(marker.parent, store / "v2" / "staging", _KEY, 30.0, 30.0) for _ in range(2))

    def meanwhile(self: KeyFiles) -> object:
        theirs.announce(Ready("m"))
        return take(self)

    monkeypatch.setattr(KeyFiles, "_take", meanwhile)
    assert ours.attempt(None) == Ready("m")
    assert not marker.exists()


def test_what_was_leased_elsewhere_is_taken_by_its_first_renewal(store: Path) -> None:
    with OtherAgent(store) as one, OtherAgent(store) as other:
        assert one.ask("renew", _KEY, "a") is True
        assert other.ask("acquire", _KEY, "b", "host-b")[0] == "Wait"
        assert other.ask("renew", _KEY, "b") is False
        assert one.ask("release", _KEY, "a") is True
        assert one.ask("renew", _KEY, "a") is False, "a token that gave its lease up took it again"
        assert other.ask("acquire", _KEY, "b", "host-b")[0] == "Lease"


def test_a_marker_that_somebody_removed_is_made_again_by_its_holder(store: Path) -> None:
    with OtherAgent(store) as holder, OtherAgent(store) as other:
        holder.ask("acquire", _KEY, "a", "host-a")
        path_of(store, "lease").unlink()
        assert holder.ask("renew", _KEY, "a") is True
        assert other.ask("acquire", _KEY, "b", "host-b")[0] == "Wait"


# Nodes that differ in their settings.


def test_a_living_holder_with_a_shorter_or_longer_ttl_is_waited_for(store: Path) -> None:
    for holders, waiters in ((TTL, 2 * TTL), (2 * TTL, TTL)):
        with OtherAgent(store, holders) as holder, OtherAgent(store, waiters) as waiter:
            holder.ask("keep", _KEY, "a", "host-a")
            end = time.monotonic() + 6 * TTL
            while time.monotonic() < end:
                assert waiter.ask("acquire", _KEY, "b", "host-b")[0] == "Wait"
            assert holder.ask("release", _KEY, "a") is True
            assert waiter.ask("acquire", _KEY, "b", "host-b")[0] == "Lease"
            assert waiter.ask("release", _KEY, "b") is True


async def test_a_dead_holder_with_another_ttl_is_waited_out(store: Path) -> None:
    async with leases_in(store, ttl=TTL) as service:
        began = time.monotonic()
        path_of(store, "lease").write_bytes(marker_of_another_host(2 * TTL))
        assert isinstance(await asyncio.wait_for(await_turn(service, _KEY, "b", "host-b"), BOUND), Lease)
        assert time.monotonic() - began > 2 * TTL


# What others left there.


def _link(path: Path) -> None:
    (path.parent / "target").write_text("precious")
    path.symlink_to(path.parent / "target")


_GARBAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(os.urandom(300)),
    "a huge file": lambda path: path.write_bytes(bytes(20 << 20)),
    "a link": _link,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "a file that nobody may read": lambda path: (path.write_bytes(b"x"), path.chmod(0)),
    "a lease that is cut off": lambda path: path.write_bytes(marker_of_another_host(TTL)[:50]),
    "a lease for ever": lambda path: path.write_bytes(marker_of_another_host(TTL).replace(b"0.4", b"1e400")),
    "a lock of another kind": lambda path: path.write_bytes(marker_of_another_host(TTL, "exclusive")),
    "a lock of the future": lambda path: path.write_bytes(marker_of_another_host(TTL, "quantum")),
    "a lock of the past": lambda path: path.write_bytes(b"1\nvanished\n"),
    "nested msgpack": lambda path: path.write_bytes(b"\x91" * 5000),
    "no outcome": lambda path: path.write_bytes(msgpack.packb({"state": "ready"})),
    "another outcome": lambda path: path.write_bytes(msgpack.packb({"state": "ready", "manifest": 7})),
    "a failure without a log": lambda path: path.write_bytes(msgpack.packb({"state": "failed", "log": None})),
}


@pytest.mark.parametrize("name", _GARBAGE)
async def test_garbage_in_a_markers_place_holds_its_key_up_for_a_ttl_and_no_other(store: Path, name: str) -> None:
    async with leases_in(store, ttl=TTL) as service:
        path = path_of(store, "lease")
        _GARBAGE[name](path)
        other = _KEY[:2] + some_key()
        await won(service, other)
        lease = await asyncio.wait_for(await_turn(service, _KEY, "b", "host-b"), BOUND)
        assert isinstance(lease, Lease)
        assert isinstance(await service.acquire(_KEY, "c", "host-c"), Wait)
        await lease.release()
        await won(service, _KEY, "c")
    assert not path_of(store, "lease").exists()
    if name == "a link":
        assert (path_of(store, "lease").parent / "target").read_text() == "precious"


@pytest.mark.parametrize("name", _GARBAGE)
async def test_garbage_in_an_outcomes_place_is_no_outcome_and_is_replaced(store: Path, name: str) -> None:
    async with leases_in(store) as service:
        _GARBAGE[name](path_of(store, "outcome"))
        await won(service, _KEY, "b")
        assert not os.path.lexists(path_of(store, "outcome"))
        _GARBAGE[name](path_of(store, "outcome", some_other := _KEY[:2] + some_key()))
        await service.ready(some_other, "m")
        assert await service.acquire(some_other, "c", "host-c") == Ready("m")


async def test_a_directory_in_a_markers_place_leaves_its_key_uncoordinated_and_no_other(store: Path) -> None:
    async with leases_in(store, ttl=TTL) as service:
        path_of(store, "lease").mkdir()
        for token in ("a", "b"):
            assert await service.acquire(_KEY, token, "host") == Unleased()
            lease = Lease(service, _KEY, token, "host", 300.0)
            assert not await lease.renew()
            assert not await lease.release()
        await service.ready(_KEY, "m")
        assert await service.acquire(_KEY, "c", "host") == Ready("m")


async def test_a_directory_in_an_outcomes_place_keeps_the_news_from_others_and_nothing_else(store: Path) -> None:
    async with leases_in(store) as service:
        (path_of(store, "outcome") / "full").mkdir(parents=True)
        await won(service, _KEY)
        waiter = await waiting(service, _KEY, "b")
        await service.ready(_KEY, "m")
        assert isinstance(await asyncio.wait_for(waiter, BOUND), Lease)
    assert not litter(store)


async def test_a_failure_is_forgotten_by_the_file_systems_clock_and_its_file_removed(store: Path) -> None:
    async with leases_in(store) as service:
        await (await won(service, _KEY)).fail("log", "where")
        path = path_of(store, "outcome")
        for moment, kind in ((time.time() - 29, Failed), (time.time() + 29, Failed), (time.time() - 31, Lease)):
            os.utime(path, (moment, moment))
            assert isinstance(await service.acquire(_KEY, "b", "host-b"), kind)
        assert not path.exists()


# A file system that cannot.


def test_a_marker_that_could_not_be_removed_holds_its_key_up_for_a_ttl_and_no_longer(
    store: Path, interposer: Interposer
) -> None:
    with OtherAgent(store, TTL, **interposer.environ) as holder, OtherAgent(store, TTL) as other:
        for next_ in (other, holder):
            assert holder.ask("acquire", _KEY, "a", "host-a")[0] == "Lease"
            fault = interposer.fail("unlink", below=path_of(store, "lease"), error=errno.EIO)
            assert holder.ask("release", _KEY, "a") is True
            assert fault.hits
            assert path_of(store, "lease").exists()
            assert next_.ask("acquire", _KEY, "b", "host-b")[0] == "Wait"
            assert next_.ask("await", _KEY, "b", "host-b")[0] == "Lease"
            fault.end()
            assert next_.ask("release", _KEY, "b") is True
            assert not path_of(store, "lease").exists()
    assert not litter(store)


@pytest.mark.skipif(FILELOCK < (4, 3), reason="filelock before 4.3 forgets the marker, which stays for its TTL")
def test_a_marker_that_could_not_be_removed_is_removed_by_the_next_claim_once_it_can_be(
    store: Path, interposer: Interposer
) -> None:
    with OtherAgent(store, 300.0, **interposer.environ) as holder:
        holder.ask("acquire", _KEY, "a", "host-a")
        fault = interposer.fail("unlink", below=path_of(store, "lease"), error=errno.EIO)
        assert holder.ask("release", _KEY, "a") is True
        assert holder.ask("acquire", _KEY, "b", "host-b")[0] == "Wait", "filelock holds it still"
        fault.end()
        assert holder.ask("acquire", _KEY, "b", "host-b")[0] == "Lease"
        markers = [
            each for each in Path(f"/proc/{holder.pid}/fd").iterdir() if each.readlink() == path_of(store, "lease")
        ]
        assert len(markers) <= 1, "the file of the removed marker is closed"


def test_a_lease_that_could_not_be_touched_for_most_of_its_ttl_is_kept_by_renewing_once_it_can_be(
    store: Path, interposer: Interposer
) -> None:
    """filelock's heartbeat gives up then, and would leave the marker to whoever comes when the TTL has run out."""
    with OtherAgent(store, TTL, **interposer.environ) as holder, OtherAgent(store, TTL) as other:
        assert holder.ask("keep", _KEY, "a", "host-a")[0] == "Lease"
        fault = interposer.fail("utime", below=path_of(store, "lease"), error=errno.EIO)
        deadline = time.monotonic() + BOUND
        while fault.hits < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(TTL / 2)  # the heartbeat's last attempt, too
        fault.end()
        end = time.monotonic() + 4 * TTL
        while time.monotonic() < end:
            assert other.ask("acquire", _KEY, "b", "host-b")[0] == "Wait"
            assert holder.ask("renew", _KEY, "a") is True


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        ("open", errno.EROFS, "mount it read-write"),
        ("open", errno.EACCES, "let this user read and write"),
        ("open", errno.ESTALE, "mount it again"),
        ("write", errno.ENOSPC, "free space"),
    ],
)
def test_a_file_system_that_refuses_is_told_with_the_remedy_and_used_again_later(
    store: Path, interposer: Interposer, call: str, error: int, remedy: str
) -> None:
    with OtherAgent(store, **interposer.environ) as agent:
        assert agent.ask("acquire", _KEY, "a", "host")[0] == "Lease"
        fault = interposer.fail(call, below=store / "v2", error=error)
        for command in (("acquire", "cd" * 32, "a", "host"), ("ready", "cd" * 32, "a", "m")):
            kind, why, _ = agent.ask(*command)
            assert kind == "LeaseUnavailable"
            assert remedy in why
            assert "\n" not in why
        fault.end()
        assert agent.ask("ping", "-") is None
        assert agent.ask("acquire", "cd" * 32, "a", "host")[0] == "Lease"
        assert agent.ask("release", "cd" * 32, "a")
        assert agent.ask("release", _KEY, "a")
    assert not litter(store)


async def test_a_store_that_is_not_there_is_unavailable_and_is_not_made(tmp_path: Path) -> None:
    async with leases_in(tmp_path / "unmounted") as service:
        for command in (lambda: service.acquire(_KEY, "a", "host"), lambda: probe(service)):
            with pytest.raises(LeaseUnavailable, match="create it, or mount it"):
                await command()
    assert not (tmp_path / "unmounted").exists()


def test_a_file_system_that_hangs_is_given_up_within_seconds_and_a_late_lease_given_back(
    store: Path, interposer: Interposer
) -> None:
    with OtherAgent(store, **interposer.environ) as agent, OtherAgent(store) as other:
        stall = interposer.stall("open", below=store / "v2" / "leases", seconds=5.0, times=1)
        kind, _, took = agent.ask("acquire", _KEY, "a", "host")
        assert kind == "LeaseUnavailable"
        assert took < 5.0
        stall.end()
        assert agent.ask("release", _KEY, "a") is False  # after the one that hangs
        assert other.ask("await", _KEY, "b", "host")[0] == "Lease", "the late lease was not given back"


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system in which every attempt hangs until this is set."""
    resumed = threading.Event()
    attempt = KeyFiles.attempt

    def hang(self: KeyFiles, void: str | None) -> object:
        assert resumed.wait(60)
        return attempt(self, void)

    monkeypatch.setattr(KeyFiles, "attempt", hang)
    yield resumed
    resumed.set()


async def test_a_cancelled_claim_that_was_won_all_the_same_is_given_back(store: Path, hanging: threading.Event) -> None:
    async with leases_in(store) as service:
        claim = asyncio.create_task(service.acquire(_KEY, "a", "host"))
        while not service._busy:
            await asyncio.sleep(0)
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)
        hanging.set()
        while service._tasks:
            await asyncio.sleep(0.01)
        assert not path_of(store, "lease").exists()


# What it costs.


async def test_the_memory_of_keys_that_were_asked_for_is_bounded(store: Path) -> None:
    async with leases_in(store) as service:
        lease = await won(service, _KEY)
        for n in range(1100):
            await service.ready(f"k{n}", "m")
        assert len(service._keys) <= 1001
        assert await lease.renew(), "a lease was forgotten"


async def test_a_waiter_looks_ever_more_seldom(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    for name in ("attempt", "changes"):
        original = getattr(KeyFiles, name)
        monkeypatch.setattr(KeyFiles, name, lambda *a, _o=original: (looks.append(time.monotonic()), _o(*a))[1])
    async with leases_in(store) as service:
        path_of(store, "lease").write_bytes(marker_of_another_host(30.0))
        waiter = await waiting(service, _KEY, "b")
        began = time.monotonic()
        await asyncio.sleep(3.0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert sum(t > began + 1.5 for t in looks) <= 8
        assert len(looks) <= 30
