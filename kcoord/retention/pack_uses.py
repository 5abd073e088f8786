"""Uses of artifacts that packs tell: jobs touch a profile's pack once a day, and all that its index lists is in use with it."""

from __future__ import annotations

from pathlib import Path

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.profiles.packs import all_packs
from kcoord.transfer.pack import PackUnused, look_at_pack

_MOST = 4_000_000  # artifacts of all packs, which anybody may have written


def uses_by_packs(store: Path, trust: Trust) -> dict[str, float]:
    """The last uses of artifacts, in seconds of the file system's clock, by digest. Raises OSError.

    A pack that cannot be read, or that `trust` refuses, tells none. A forged one keeps artifacts, and removes none.
    """
    found: dict[str, float] = {}
    opened = Store(store, trust)
    for path, status in all_packs(store):
        try:
            digests = look_at_pack(opened, path)
        except PackUnused:
            continue
        for digest in digests:
            if len(found) < _MOST or digest in found:
                found[digest] = max(status.st_mtime, found.get(digest, 0.0))
    return found
