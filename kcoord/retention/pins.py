"""Pins: profiles whose artifacts are never removed from the store.

A pin is ``<store>/v2/pins/<profile>.pin``: the digests that the profile's jobs had asked for when the pin was last updated. Each
`kcoord gc` adds those that they have asked for since (`kcoord.profiles.requested`), so a pin outlives the files that it was made
of.

Fails closed: while a pin cannot be read, nothing is removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import CHECK, LAYOUT, body_of, replace_file, with_check
from kcoord.files.faults import store_errors
from kcoord.files.reading import read_plain
from kcoord.settings import profile_name

_FORMAT = b"kcoord-pin-1\n"
_DIGEST = 32  # bytes
_MOST_DIGESTS = 1_000_000
_MOST_PINS = 10_000
_MOST_HELD = 4 * _MOST_DIGESTS  # in all pins
_SUFFIX = ".pin"


def pin(store: Path, profile: str, digests: Iterable[str], *, anew: bool = True) -> set[str]:
    """Pin `profile`, or add `digests` to its pin; returns all digests that it holds then. Raises `StoreError`.

    Without `anew` a profile that is not pinned stays so: somebody has unpinned it meanwhile. Not guaranteed: that an unpin in the
    very moment of the rename lasts.
    """
    path = _path(store, profile)
    with store_errors(path.parent):
        with suppress(FileExistsError):
            path.parent.mkdir()
        held = _read(path) if path.name in _names(path.parent) else set()
        wanted = held | set(digests)
        if wanted != held or not path.exists():
            if len(wanted) > _MOST_DIGESTS:
                raise StoreError(f"{path}: {len(wanted)} artifacts are too many for a pin")
            body = b"".join(bytes.fromhex(d) for d in sorted(wanted))
            replace_file(path, with_check(_FORMAT, body), store / LAYOUT / "staging", store, durable=True, create=anew)
    return wanted


def unpin(store: Path, profile: str) -> bool:
    """False: it was not pinned. Raises `StoreError`."""
    path = _path(store, profile)
    with store_errors(path), suppress(FileNotFoundError):
        beneath.unlink(path, store)
        return True
    return False


def load_pins(store: Path) -> dict[str, set[str]]:
    """The digests that each pinned profile holds. Raises `StoreError` if any of it cannot be read."""
    directory = store / LAYOUT / "pins"
    found, left = {}, _MOST_HELD
    with store_errors(directory):
        for name in sorted(_names(directory)):
            with suppress(FileNotFoundError):  # unpinned in this very moment
                found[name[: -len(_SUFFIX)]] = held = _read(directory / name)
                left -= len(held)
            if left < 0:
                raise StoreError(f"{directory}: its pins hold more than {_MOST_HELD:,} artifacts: unpin some")
    return found


def _path(store: Path, profile: str) -> Path:
    return store / LAYOUT / "pins" / f"{profile_name(profile)}{_SUFFIX}"


def _names(directory: Path) -> list[str]:
    try:
        names = [p.name for p in directory.iterdir() if p.name.endswith(_SUFFIX)]
    except FileNotFoundError:
        return []
    if len(names) > _MOST_PINS:
        raise StoreError(f"{directory}: {len(names)} pins are too many: unpin some")
    return names


def _read(path: Path) -> set[str]:
    try:
        body = body_of(_FORMAT, read_plain(path, len(_FORMAT) + CHECK + _MOST_DIGESTS * _DIGEST))
        if len(body) % _DIGEST:
            raise ValueError("it is no list of digests")
    except ArtifactInvalid as error:
        raise StoreError(f"{error}: unpin it, and pin it again") from error
    except ValueError as error:
        raise StoreError(f"{path}: {error}: unpin it, and pin it again") from error
    return {body[n : n + _DIGEST].hex() for n in range(0, len(body), _DIGEST)}
