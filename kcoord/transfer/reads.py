"""Artifacts of a store, read in order: several at a time, and none twice that fits into memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from kcoord.artifacts.object import StoredObject
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid


class Reads:
    """Reads of `store`. An NFS server takes its time for a request, and has time for many: so `abreast` are read at a time.

    An artifact of more than `largest` bytes is not read. Memory holds twice `abreast` of them, and `room` bytes for another read.
    ``here(digest)`` is asked first: an artifact of which this node has a copy, verified; it raises `ArtifactInvalid`.
    """

    def __init__(
        self,
        store: Store,
        *,
        abreast: int = 1,
        largest: int | None = None,
        room: int = 0,
        here: Callable[[str], StoredObject | None] | None = None,
    ) -> None:
        self._store, self._abreast, self._largest = store, abreast, largest
        self._here = here if here is not None else lambda digest: None
        self._kept: dict[str, StoredObject] = {}
        self._room, self._counting = room, threading.Lock()

    def of(self, digests: Iterable[str], gone: str) -> Iterator[tuple[str, StoredObject | None, str]]:
        """Each artifact; or None and why: it does not verify, is too large, or `gone`. Raises `StoreError`."""
        if self._abreast == 1:
            yield from (self._read(digest, gone) for digest in digests)
            return
        with ThreadPoolExecutor(self._abreast, "store") as pool:
            reads: deque[Future[tuple[str, StoredObject | None, str]]] = deque()
            for digest in digests:
                reads.append(pool.submit(self._read, digest, gone))
                if len(reads) > self._abreast:
                    yield reads.popleft().result()
            while reads:
                yield reads.popleft().result()

    def _read(self, digest: str, gone: str) -> tuple[str, StoredObject | None, str]:
        found = self._kept.pop(digest, None)
        if found is not None:
            return digest, found, ""
        with suppress(ArtifactInvalid):  # the store's own may be whole
            found = self._here(digest)
        try:
            found = found or self._store.object(digest, self._largest)
        except ArtifactInvalid as error:
            return digest, None, str(error)
        if found is not None:
            with self._counting:
                if found.size <= self._room:
                    self._room -= found.size
                    self._kept[digest] = found
        return digest, found, gone
