"""Prefetch: the artifacts that a profile's jobs needed are fetched into the local tier before the next job starts.

For an init container, or a prologue. It speaks to no agent and no Redis: it reads the store, and installs into the local tier
the artifacts that verify, as an agent would when a rank asks: from the profile's pack, or one by one. An artifact that it leaves
out is fetched when a rank asks: so any fault (no store, a store that hangs, a full disk) ends the prefetch early, and no job with
it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kcoord.artifacts import local
from kcoord.artifacts.object import memory_of
from kcoord.artifacts.signing import OFF, Trust
from kcoord.artifacts.store import Store
from kcoord.cgroups import free_memory
from kcoord.errors import ArtifactInvalid, KcoordError, StoreError
from kcoord.files import private
from kcoord.files.daemon import in_daemon
from kcoord.keys.cache_key import CacheKey
from kcoord.profiles.parts import load_profile, save_part, unvouched
from kcoord.profiles.requested import RequestedArtifact, load_requested, requested_directory
from kcoord.settings import Settings
from kcoord.transfer.pack import Pack, PackUnused, read_pack
from kcoord.transfer.packs_here import note_here
from kcoord.units import bytes_text

_AT_ONCE = 8  # artifacts; an NFS server's answers overlap
_MOST_IN_MEMORY = 512 << 20  # bytes, of all that are fetched at once
_EVERY = 5.0  # seconds between two lines of progress


PlaceOf = Callable[[CacheKey], str]


@dataclass
class Fetched:
    """Counts of artifacts, and bytes of their files. `there` were in the local tier. `why` it ended early; empty: it did not."""

    needed: int = 0
    fetched: int = 0
    size: int = 0
    there: int = 0
    missing: int = 0
    seconds: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        text = f"{self.fetched} artifacts ({self.size / 1e6:.1f} MB) fetched in {self.seconds:.1f} s, {self.there} were there"
        if self.missing:
            text += f", {self.missing} are not in the store"
        left = self.needed - self.fetched - self.there - self.missing
        if self.why:
            text += f"; {left} left for when they are asked for: {self.why}"
        return text


def prefetch(
    settings: Settings,
    *,
    timeout: float,
    most: int,
    say: Callable[[str], object],
    place_of: PlaceOf = lambda key: local.place_of(key.digest),
) -> Fetched:
    """Fetch the artifacts that the profile `settings.recorded_as` needs, for at most `timeout` seconds, and at most `most` bytes.

    An artifact is in memory for a moment; all together take half of a container's free memory at most, since an init container
    that is killed for its memory fails its pod. A larger artifact is left out.

    Returns in time also from a store that hangs: its threads are left behind, so end the process by `os._exit`. Raises nothing
    for the sake of the store, the profile or the disk. ``say(line)`` is called with lines of progress. The profile's recipes are
    copied to this node, too: then a warm-up beside the agent needs no store of its own.

    ``place_of(key)`` is the place below the local directory at which a rank looks for an artifact. A list that names another
    place for it is wrong, or forged: the artifact is left out.
    """
    begun = time.monotonic()
    work = _Prefetch(settings, most, place_of)
    working = in_daemon(work.run)
    next_line = begun + _EVERY
    while not wait({working}, timeout=max(0.0, min(begun + timeout, next_line) - time.monotonic())).done:
        now = time.monotonic()
        if now >= begun + timeout:
            work.stop(f"{timeout:g} s are over")
            break
        if now >= next_line:
            next_line = now + _EVERY
            found = work.so_far()
            say(
                f"{found.fetched + found.there} of {found.needed} artifacts are on this node, {found.size / 1e6:.1f} MB"
            )
    found = work.so_far()
    found.seconds = time.monotonic() - begun
    return found


class _Prefetch:
    def __init__(self, settings: Settings, most: int, place_of: PlaceOf) -> None:
        self._settings, self._most, self._place_of, self._trust = settings, most, place_of, OFF
        self._pack: Pack | None = None
        self._room = min(_MOST_IN_MEMORY, free_memory() // 2)  # bytes
        self._changed = threading.Condition()  # protects the fields below; notified when there may be room again
        self._found = Fetched()
        self._left: list[RequestedArtifact] = []
        self._taken = 0  # bytes of memory
        self._begun = 0  # bytes of artifacts that are being fetched

    def so_far(self) -> Fetched:
        with self._changed:
            return replace(self._found)

    def stop(self, why: str) -> None:
        """Begin no other artifact; the first reason is kept."""
        with self._changed:
            self._found.why = self._found.why or why
            self._left = []

    def run(self) -> None:
        try:
            self._run()
        except (KcoordError, OSError) as error:
            self.stop(str(error))

    def _run(self) -> None:
        root, name = self._settings.store_root, self._settings.recorded_as
        if name is None or root is None:
            unset = "KCOORD_PROFILE is not set, so nothing says what is needed"
            self.stop(unset if name is None else "KCOORD_STORE is not set, so there is nothing to fetch from")
            return
        self._trust = Trust.of(self._settings)
        private.make_private(self._settings.local_dir)
        self._copy_profile(name)  # first: it is small, and artifacts that are left out below can be compiled together
        needs = load_requested(requested_directory(root, name))
        if not all((self._settings.local_dir / need.place).exists() for need in needs):
            with suppress(PackUnused):  # then all are looked up
                self._pack = read_pack(Store(root, self._trust), name, self._settings.local_dir)
        with self._changed:
            self._found.needed = len(needs)
            self._left = needs[::-1]
        wait([in_daemon(functools.partial(self._fetch_all, root)) for _ in range(_AT_ONCE)])
        if self._pack is not None:
            note_here(self._settings.local_dir, self._pack.place.stem)
            self._pack.close()

    def _copy_profile(self, name: str) -> None:
        """A first job has none. With a key only what it vouches for: nobody judges a node's own copy again."""
        settings, copies = self._settings, unvouched(self._settings.local_dir)
        if self._trust.keys:
            settings, copies = replace(settings, trust="require"), settings.local_dir / "profiles"
        try:
            recipes = load_profile(settings, name)
        except StoreError:
            raise
        except KcoordError:
            return
        save_part(copies / name, recipes, local_dir=settings.local_dir)

    def _fetch_all(self, root: Path) -> None:
        store = Store(root, self._trust)
        try:
            while (need := self._next()) is not None:
                self._fetch(store, need)
        except (StoreError, OSError) as error:
            self.stop(str(error))

    def _next(self) -> RequestedArtifact | None:
        with self._changed:
            return self._left.pop() if self._left else None

    def _fetch(self, store: Store, need: RequestedArtifact) -> None:
        home = self._settings.local_dir / need.place
        if local.is_whole(home, need.digest, vouched=self._trust.required):
            self._count(there=1)
            return
        pack = self._pack
        if not ((pack is not None and self._bring(pack, need)) or self._bring(store, need)):
            self._count(missing=1)  # a rank that needs it compiles it, and is told why

    def _bring(self, source: Store | Pack, need: RequestedArtifact) -> bool:
        """False: `source` has no usable artifact for it."""
        try:
            stated = source.stated(need.digest)
            if stated is None or self._place_of(stated[0].key) != need.place:
                return False
            if self._may_take(size := stated[0].size, needed := memory_of(stated[0])):
                try:
                    found = source.fetch(need.digest, stated[1])
                    if found is None:
                        return False
                    local_dir = self._settings.local_dir
                    local.install(found[0], found[1], local_dir / need.place, local_dir)
                    self._count(fetched=1, size=size)
                finally:
                    self._give_back(size, needed)
        except ArtifactInvalid:
            return False
        return True

    def _may_take(self, size: int, needed: int) -> bool:
        """Wait until there are `needed` bytes of memory for an artifact of `size` bytes. False: it would never fit, or would be
        too much.
        """
        with self._changed:
            if needed > self._room:
                self._found.why = (
                    self._found.why or f"an artifact of {bytes_text(size)} needs more memory than there is"
                )
                return False
            self._changed.wait_for(lambda: self._taken + needed <= self._room)
            if self._found.size + self._begun + size > self._most:
                self._found.why, self._left = self._found.why or f"{self._most >> 20} MiB are enough", []
                return False
            self._taken, self._begun = self._taken + needed, self._begun + size
            return True

    def _give_back(self, size: int, needed: int) -> None:
        with self._changed:
            self._taken, self._begun = self._taken - needed, self._begun - size
            self._changed.notify_all()

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, count in more.items():
                setattr(self._found, name, getattr(self._found, name) + count)
