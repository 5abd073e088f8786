"""Prefetch: the pack of a profile is read, and its artifacts are installed on this node, before the next job starts.

For an init container, or a prologue. It speaks to no agent and no Redis. An artifact that it leaves out is fetched when a rank
asks: so any fault (no store, a store that hangs, a full disk) ends the prefetch early, and no job with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace

from kcoord.artifacts import local
from kcoord.artifacts.object import memory_of
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.cgroups import free_memory
from kcoord.errors import ArtifactInvalid, KcoordError, StoreError
from kcoord.files import private
from kcoord.files.daemon import in_daemon
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.index import Use
from kcoord.packs.pack import Pack, read_pack
from kcoord.packs.pack_files import note_here
from kcoord.packs.recipe_files import load_profile, save_part, unvouched
from kcoord.settings import Settings
from kcoord.units import bytes_text

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
    memory: Callable[[], int] = lambda: free_memory() // 2,
) -> Fetched:
    """Install the artifacts that the pack of `settings.recorded_as` lists, for at most `timeout` seconds, and at most `most`
    bytes.

    Those whose bytes the pack lacks are fetched from the store. One that would take more than ``memory()`` bytes is left out:
    an init container that is killed for its memory fails its pod. Returns in time also from a store that hangs: its thread is
    left behind, so end the process by `os._exit`. Raises nothing for the sake of the store, the pack or the disk.
    ``say(line)`` is called with lines of progress. The profile's recipes are copied to this node, too: then a warm-up beside
    the agent needs no store.

    ``place_of(key)`` is the place below the local directory at which a rank looks for an artifact. A pack that names another
    place for it is wrong, or forged: the artifact is left out.
    """
    begun = time.monotonic()
    work = _Prefetch(settings, most, place_of, memory)
    working = in_daemon(work.run)
    next_line = begun + _EVERY
    while not wait({working}, timeout=max(0.0, min(begun + timeout, next_line) - time.monotonic())).done:
        now, found = time.monotonic(), work.found
        if now >= begun + timeout:
            work.stop(f"{timeout:g} s are over")
            break
        if now >= next_line:
            next_line = now + _EVERY
            there = found.fetched + found.there
            say(f"{there} of {found.needed} artifacts are on this node, {found.size / 1e6:.1f} MB")
    return replace(work.found, seconds=time.monotonic() - begun)


class _Prefetch:
    def __init__(self, settings: Settings, most: int, place_of: PlaceOf, memory: Callable[[], int]) -> None:
        self._settings, self._most, self._place_of = settings, most, place_of
        self._memory = memory
        self.found = Fetched()
        self._stopped = False

    def stop(self, why: str) -> None:
        """Begin no other artifact; the first reason is kept."""
        self.found.why, self._stopped = self.found.why or why, True

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
        store = Store(root, Trust.of(self._settings))
        private.make_private(self._settings.local_dir)
        self._copy_profile(
            store.trust, name
        )  # first: it is small, and artifacts that are left out can be compiled together
        pack = read_pack(store, name, self._settings.local_dir)
        if pack is None:
            return
        with pack:
            uses = [use for use in pack.index.uses if use.place]
            self.found.needed = len(uses)
            for use in uses:
                if self._stopped:
                    return
                self._bring(pack, store, use)
        note_here(self._settings.local_dir, pack.place.stem)

    def _copy_profile(self, trust: Trust, name: str) -> None:
        """A first job has none. With a key only what it vouches for: nobody judges a node's own copy again."""
        settings, copies = self._settings, unvouched(self._settings.local_dir)
        if trust.keys:
            settings, copies = replace(settings, trust="require"), settings.local_dir / "profiles"
        try:
            recipes = load_profile(settings, name)
        except StoreError:
            raise
        except KcoordError:
            return
        save_part(copies / name, recipes, local_dir=settings.local_dir)

    def _bring(self, pack: Pack, store: Store, use: Use) -> None:
        local_dir, found = self._settings.local_dir, self.found
        if local.is_whole(local_dir / use.place, use.digest, vouched=store.trust.required):
            found.there += 1
            return
        fetched = None
        with suppress(ArtifactInvalid):
            fetched = pack.fetch(use.digest)
        with suppress(ArtifactInvalid):
            if fetched is None and (stated := store.stated(use.digest)) is not None:
                if memory_of(stated[0]) > self._memory():
                    found.why = f"an artifact of {bytes_text(stated[0].size)} needs more memory than there is"
                    return
                fetched = store.fetch(use.digest, stated[1])
            if fetched is not None and self._place_of(fetched[0].key) == use.place:
                if found.size + fetched[0].size > self._most:
                    self.stop(f"{self._most >> 20} MiB are enough")
                    return
                local.install(fetched[0], fetched[1], local_dir / use.place, local_dir)
                found.fetched, found.size = found.fetched + 1, found.size + fetched[0].size
                return
        found.missing += 1  # a rank that needs it compiles it, and is told why
