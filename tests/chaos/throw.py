"""The faults, thrown for real. `Thrower.begin` starts one, and says what it came to; what lasts ends with `end`."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kcoord.protocol import frames
from kcoord.protocol.identity import Identity
from tests.chaos.compiler import key_of
from tests.chaos.schedule import Fault, Round
from tests.chaos.site import Site
from tests.support.interpose import Interposer
from tests.support.redis_server import RedisServer, lease_name

_WRITES = ("mkdir", "rename", "unlink", "link", "write", "utime")
_STORE_ERRORS = {
    "EROFS": (errno.EROFS, _WRITES), "ENOSPC": (errno.ENOSPC, ("mkdir", "write")),
    "EDQUOT": (errno.EDQUOT, ("mkdir", "write")), "EACCES": (errno.EACCES, ("mkdir", "rename", "link", "open")),
    "EIO": (errno.EIO, ("open", "read", "write", "rename", "link", "fsync")),
    "ESTALE": (errno.ESTALE, ("open", "read", "rename", "link")),
    "no-links": (errno.EPERM, ("link",)),
    "EIO-once": (errno.EIO, ("read",)), "ESTALE-once": (errno.ESTALE, ("open",)),
}  # fmt: skip


@dataclass
class Thrown:
    """A fault that was thrown, from `began` to `ended` on the monotonic clock. `met`: it had something to hit."""

    fault: Fault
    began: float
    ended: float = 0.0
    met: bool = False
    note: str = ""
    undo: list[Callable[[], None]] = field(default_factory=list)


class Thrower:
    """Throws one round's faults at its `sites`, its Redis and its store."""

    def __init__(
        self,
        round_: Round,
        sites: list[Site],
        redis: RedisServer | None,
        redis_clock: Interposer | None,
        store: Path | None,
    ) -> None:
        self._round, self._sites, self._redis, self._redis_clock, self._store = round_, sites, redis, redis_clock, store
        self._stopped: dict[int, int] = {}  # pid → how many faults stop it
        self._redis_down = 0
        self._redis_stopped = False
        self._redis_full = 0

    def begin(self, fault: Fault) -> Thrown:
        thrown = Thrown(fault, time.monotonic())
        group, _, what = fault.kind.partition("-")
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, just now
            {"rank": self._rank, "agent": self._agent, "redis": self._in_redis, "store": self._in_store,
             "artifact": self._artifact, "clock": self._clock,
             "tmp": self._temporary, "local": self._local}[group](thrown, what)  # fmt: skip
        return thrown

    def end(self, thrown: Thrown) -> None:
        for undo in thrown.undo:
            with contextlib.suppress(ProcessLookupError):
                undo()
        thrown.undo.clear()
        thrown.ended = time.monotonic()

    # Each of these sets `met` if the fault had something to hit.

    def _rank(self, thrown: Thrown, what: str) -> None:
        fault = thrown.fault
        site = self._sites[fault.node]
        if what in ("dies-compiling", "raises"):
            order = self._round_directory / f"order-{fault.node}-{fault.rank}"
            fresh = order.with_suffix(".new")
            fresh.write_text("raise" if what == "raises" else fault.detail)
            fresh.rename(order)
            thrown.met = fault.rank in site.ranks
            return
        pid = site.ranks.get(fault.rank)
        if pid is None:
            return
        thrown.met, thrown.note = True, f"pid {pid}"
        if what == "stop":
            self._stop(pid, thrown)
        else:
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGTERM)

    def _agent(self, thrown: Thrown, what: str) -> None:
        site = self._sites[thrown.fault.node]
        if what == "frames":
            return self._frames(thrown, site)
        pids = site.agents()
        thrown.met, thrown.note = bool(pids), f"pids {pids}"
        for pid in pids:
            if what in ("stop", "hang"):
                self._stop(pid, thrown)
            else:
                os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGTERM)
        return None

    def _stop(self, pid: int, thrown: Thrown) -> None:
        """SIGSTOP until the last of the faults that stop it ends."""
        os.kill(pid, signal.SIGSTOP)
        self._stopped[pid] = self._stopped.get(pid, 0) + 1

        def resume() -> None:
            self._stopped[pid] -= 1
            if not self._stopped[pid]:
                os.kill(pid, signal.SIGCONT)

        thrown.undo.append(resume)

    def _frames(self, thrown: Thrown, site: Site) -> None:
        dice = random.Random(thrown.fault.salt)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(0.2)
        thrown.undo.append(connection.close)
        hello = frames.encode_frame(Identity(1, None, None, "chaos").hello())
        content = {
            "noise": dice.randbytes(dice.randrange(1, 4096)),
            "huge": struct.pack(">I", 0x7FFFFFFF) + b"x" * 100,
            "half": hello + struct.pack(">I", 1000) + b"x" * 10,
            "future": frames.encode_frame({**Identity(1, None, None, "chaos").hello(), "protocol": 999}),
            "silent": b"",
            "foreign": hello + frames.encode_frame({"id": 1, "op": "publish", "token": 7, "key": dice.randbytes(20)}),
        }[thrown.fault.detail]
        try:
            connection.connect(str(site.socket))
            connection.sendall(content, socket.MSG_NOSIGNAL)
        except OSError as error:  # there is no agent at this moment
            thrown.note = str(error)
        else:
            thrown.met = True

    def _temporary(self, thrown: Thrown, what: str) -> None:
        site = self._sites[thrown.fault.node]
        if what == "new":  # as a job's own /tmp is gone with the job, and its next one has another
            for each in site.temporary.iterdir():
                shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink(missing_ok=True)
            thrown.met = True
        elif not site.mounted:
            thrown.note = "this user may not mount"
        elif what == "noexec":
            thrown.met = site.remount("noexec")
            thrown.undo.append(lambda: site.remount("exec") and None)
        else:
            filler = site.temporary / f"filler-{thrown.fault.number}"
            thrown.undo.append(lambda: filler.unlink(missing_ok=True))
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            thrown.met = True

    def _local(self, thrown: Thrown, what: str) -> None:
        """In one moment, as a Slurm epilog's ``rm`` of a directory is for whoever asks later."""
        site = self._sites[thrown.fault.node]
        gone = self._round_directory / f"gone-{thrown.fault.number}"
        with contextlib.suppress(FileNotFoundError):  # removed before, and nobody has made it since
            site.local.rename(gone)
            thrown.met = True
        shutil.rmtree(gone, ignore_errors=True)

    def _clock(self, thrown: Thrown, what: str) -> None:
        interposer = self._sites[thrown.fault.node].interposer
        self._step(thrown, interposer)

    def _step(self, thrown: Thrown, interposer: Interposer | None) -> None:
        if interposer is None:
            thrown.note = "no C compiler"
            return
        interposer.clock(float(thrown.fault.detail))
        thrown.met = True
        thrown.undo.append(lambda: interposer.clock(0.0))

    def _in_redis(self, thrown: Thrown, what: str) -> None:
        assert self._redis is not None
        if what == "clock":
            return self._step(thrown, self._redis_clock)
        if what == "kill":
            return self._redis_kill(thrown)
        if self._redis_down or self._redis_stopped:
            thrown.note = "Redis was down"
            return None
        thrown.met = True
        if what in ("stop", "hang"):
            self._redis.pause()
            self._redis_stopped = True
            thrown.undo.append(self._redis_resume)
        elif what == "flush":
            self._redis.command("FLUSHALL")
        elif what == "script-flush":
            self._redis.command("SCRIPT", "FLUSH")
        elif what == "cut":
            self._redis.command("CLIENT", "KILL", "TYPE", thrown.fault.detail)
        elif what == "full":
            self._redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            self._redis.command("CONFIG", "SET", "maxmemory", "1")
            self._redis_full += 1
            thrown.undo.append(self._redis_has_room)
        elif what == "garbage":
            self._garbage(thrown)
        return None

    def _redis_kill(self, thrown: Thrown) -> None:
        assert self._redis is not None
        thrown.met = True
        if not self._redis_down:
            self._redis.kill()
        self._redis_stopped = False
        self._redis_down += 1
        thrown.undo.append(self._redis_start)

    def _redis_start(self) -> None:
        assert self._redis is not None
        self._redis_down -= 1
        if not self._redis_down:
            self._redis.start()

    def _redis_resume(self) -> None:
        assert self._redis is not None
        if self._redis_stopped:
            self._redis_stopped = False
            self._redis.resume()
            self._make_room()

    def _redis_has_room(self) -> None:
        self._redis_full -= 1
        self._make_room()

    def _make_room(self) -> None:
        assert self._redis is not None
        if not (self._redis_full or self._redis_down or self._redis_stopped):
            self._redis.command("CONFIG", "SET", "maxmemory", "0")

    def _garbage(self, thrown: Thrown) -> None:
        assert self._redis is not None
        dice = random.Random(thrown.fault.salt)
        name = lease_name(self._key(thrown.fault).digest)
        noise = dice.randbytes(20)
        self._redis.command("DEL", name)
        command: tuple[str | bytes, ...] = {
            "string": ("SET", name, noise),
            "list": ("RPUSH", name, noise, noise),
            "fields": ("HSET", name, noise, noise, "state", noise),
            "ready": ("SET", name, b"R" + noise),
            "half": ("SET", name, "Ltoken"),
        }[thrown.fault.detail]
        self._redis.command(*command)

    def _in_store(self, thrown: Thrown, what: str) -> None:
        assert self._store is not None
        sites = self._sites if what == "fails-everywhere" else [self._sites[thrown.fault.node]]
        for site in sites:
            if site.interposer is None:
                thrown.note = "no C compiler"
                return
            self._break_store(thrown, site.interposer, self._store)
        thrown.met = True

    def _break_store(self, thrown: Thrown, interposer: Interposer, store: Path) -> None:
        detail = thrown.fault.detail
        if thrown.fault.kind == "store-stalls":
            faults = [interposer.stall(detail, below=store, seconds=thrown.fault.seconds, times=4)]
        elif detail == "lost-link":
            faults = [interposer.fail("link", below=store / "v2" / "objects", error=errno.ENOENT, times=1, done=True)]
        else:
            error, calls = _STORE_ERRORS[detail]
            times = 1 if detail.endswith("-once") else None
            faults = [interposer.fail(call, below=store, error=error, times=times) for call in calls]
        thrown.undo += [fault.end for fault in faults]

    def _artifact(self, thrown: Thrown, what: str) -> None:
        fault = thrown.fault
        digest = self._key(fault).digest
        if what == "in-store":
            assert self._store is not None
            home = self._store / "v2" / "objects" / digest[:2] / digest
        else:
            home = self._sites[fault.node].local / "objects" / digest[:2] / digest
        try:
            _harm(home, fault.detail, random.Random(fault.salt))
        except FileNotFoundError:
            thrown.note = "it was not there yet"
            return
        thrown.met = True

    def _key(self, fault: Fault):  # type: ignore[no-untyped-def]
        return key_of(self._round.name, self._round.kernels[fault.kernel])

    @property
    def _round_directory(self) -> Path:
        return self._sites[0].directory


def _harm(home: Path, how: str, dice: random.Random) -> None:
    """Raises FileNotFoundError if there is nothing at `home`."""
    path = dice.choice(sorted(home.iterdir())) if home.is_dir() else home  # in the store an artifact is one file
    if how == "removed":
        if path == home or dice.random() < 0.5:
            path.unlink()
        else:
            shutil.rmtree(home)
        return
    size = path.stat().st_size
    if how == "truncated":
        os.truncate(path, size // 2)
        return
    with path.open("r+b") as file:
        place = dice.randrange(size)
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1 << dice.randrange(8)]))
