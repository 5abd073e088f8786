"""Prefetch: the pack of a profile is read, and its artifacts are installed on this node, before the next job starts.

For an init container, or a prologue. It speaks to no agent and no Redis. An artifact that it leaves out is fetched when a rank
asks: so any fault (no store, a store that hangs, a full disk) ends the prefetch early, and no job with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass

from kcoord.artifacts import local
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, KcoordError, StoreError
from kcoord.files import private
from kcoord.files.daemon import in_daemon
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.pack import read_pack
from kcoord.packs.pack_files import note_here
from kcoord.packs.recipe_files import load_profile, save_part
from kcoord.settings import Settings

PlaceOf = Callable[[CacheKey], str]


@dataclass
class Fetched:
    """Counts of artifacts, and bytes of their files. `there` were in the local tier. `why` it ended early; empty: it did not."""

    needed: int = 0
    fetched: int = 0
    size: int = 0
    there: int = 0
    seconds: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        text = f"{self.fetched} artifacts ({self.size / 1e6:.1f} MB) fetched in {self.seconds:.1f} s, {self.there} were there"
        left = self.needed - self.fetched - self.there
        if left or self.why:
            text += f"; {left} left for when they are asked for"
        return f"{text}: {self.why}" if self.why else text


def prefetch(
    settings: Settings, *, timeout: float, place_of: PlaceOf = lambda key: local.place_of(key.digest)
) -> Fetched:
    """Install the artifacts that the pack of `settings.recorded_as` has, for at most `timeout` seconds.

    Returns in time also from a store that hangs: its thread is left behind, so end the process by `os._exit`. Raises nothing for
    the sake of the store, the pack or the disk. The profile's recipes are copied to this node, too: then a warm-up beside the
    agent needs no store.

    ``place_of(key)`` is the place below the local directory at which a rank looks for an artifact. A pack that names another
    place for it is wrong, or forged: the artifact is left out.
    """
    begun, found = time.monotonic(), Fetched()
    working = in_daemon(lambda: _install(settings, place_of, found))
    if not wait({working}, timeout=timeout).done:
        found.why = f"{timeout:g} s are over"
    found.seconds = time.monotonic() - begun
    return found


def _install(settings: Settings, place_of: PlaceOf, found: Fetched) -> None:
    try:
        _install_pack(settings, place_of, found)
    except (KcoordError, OSError) as error:
        found.why = str(error)


def _install_pack(settings: Settings, place_of: PlaceOf, found: Fetched) -> None:
    root, name, local_dir = settings.store_root, settings.recorded_as, settings.local_dir
    if name is None:
        raise KcoordError("KCOORD_PROFILE is not set, so nothing says what is needed")
    if root is None:
        raise KcoordError("KCOORD_STORE is not set, so there is nothing to fetch from")
    store = Store(root, Trust.of(settings))
    private.make_private(local_dir)
    _copy_profile(settings, name)  # first: it is small, and artifacts that are left out can be compiled together
    pack = read_pack(store, name, local_dir)
    if pack is None:
        return
    with pack:
        uses = [use for use in pack.index.uses if use.place]
        found.needed = len(uses)
        for use in uses:
            home = local_dir / use.place
            if local.is_whole(home, use.digest):
                found.there += 1
                continue
            with suppress(ArtifactInvalid):
                fetched = pack.fetch(use.digest)
                if fetched is not None and place_of(fetched[0].key) == use.place:
                    local.install(fetched[0], fetched[1], home, local_dir)
                    found.fetched, found.size = found.fetched + 1, found.size + fetched[0].size
    note_here(local_dir, pack.place.stem)


def _copy_profile(settings: Settings, name: str) -> None:
    """A first job has none. Nobody judges a node's own copy again: its directory is that of this policy and these keys."""
    try:
        recipes = load_profile(settings, name)
    except StoreError:
        raise
    except KcoordError:
        return
    save_part(settings.local_dir / "profiles" / name, recipes, local_dir=settings.local_dir)
