"""The files of an artifact at its home, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kcoord.artifacts.manifest import (
    HOME_PLACEHOLDER,
    FileEntry,
    Manifest,
    checked_pieces,
    home_token,
)


def write_pieces(staging: Path, manifest: Manifest, opened: Callable[[FileEntry], BinaryIO]) -> dict[str, bytes]:
    """Write the files that ``opened(entry)`` opens, checked; returns the texts of those that are relocatable."""
    texts: dict[str, bytes] = {}
    for entry in manifest.files:
        with opened(entry) as file:
            pieces = checked_pieces(entry, file)
            if entry.relocatable:
                texts[entry.name] = b"".join(pieces)
                continue
            path = staging / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as copy:
                copy.writelines(pieces)
    return texts


def relocated(texts: dict[str, bytes], home: Path) -> dict[str, bytes]:
    """The portable `texts` with the name of `home` in the place of `HOME_PLACEHOLDER`."""
    token = home_token(home)
    return {name: text.replace(HOME_PLACEHOLDER, token) for name, text in texts.items()}
