"""Signing keys of a test, and stores that are read and written with them."""

from __future__ import annotations

from pathlib import Path

from kcoord.artifacts.signing import Trust, split
from kcoord.artifacts.store import Store
from kcoord.telemetry.events import Notices
from tests.support.objects import parts_of, put_together

A, B = "a" * 64, "b" * 64  # secrets, in hex
OURS, THEIRS = f"main:{A}", f"other:{B}"


def trust(*keys: str, policy: str = "require") -> Trust:
    return Trust(policy, {k.partition(":")[0]: bytes.fromhex(k.partition(":")[2]) for k in keys})


def opened(root: Path, *keys: str, policy: str = "require", notices: Notices | None = None) -> Store:
    store = Store(
        root, trust(*keys, policy=policy) if keys or policy != "require" else Trust(), (notices or Notices()).tell
    )
    store.open()
    return store


def unsigned(home: Path) -> None:
    """A downgrade: the same artifact without its signature."""
    encoded, payload = parts_of(home)
    home.write_bytes(put_together(split(encoded)[0], payload))
