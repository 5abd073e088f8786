"""Files in a profile's directories, whose body (`kcoord.files.atomic`) is a msgpack list.

Untrusted: a file may be torn, another version's or another user's.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from kcoord.errors import ArtifactInvalid
from kcoord.files.atomic import body_of, with_check
from kcoord.files.faults import store_errors
from kcoord.files.packed import unpack
from kcoord.files.reading import read_plain
from kcoord.files.shared_directory import paths_of
from kcoord.settings import is_profile_name

T = TypeVar("T")


@dataclass(frozen=True)
class FileFormat:
    """Files that begin with `head` and end in `suffix`, of at most `largest` bytes and `most` items of `values` values each."""

    head: bytes
    suffix: str
    largest: int
    most: int
    values: int

    def encode(self, items: Iterable[Any]) -> bytes:
        body = bytes(msgpack.packb(list(items), unicode_errors="surrogatepass"))
        return with_check(self.head, body)

    def decode(self, content: bytes) -> list[Any]:
        """The items, which are unchecked plain data. Raises ValueError if `content` is torn or has another format."""
        body = body_of(self.head, content)
        items = unpack(body, 1 + self.most * self.values, unicode_errors="surrogatepass")
        if not isinstance(items, list) or len(items) > self.most:
            raise ValueError(f"it is not a list of at most {self.most} items")
        return items

    def name(self, content: str) -> str:
        """The name of the file that holds what `content` describes: equal writers write one file."""
        return hashlib.sha256(content.encode()).hexdigest() + self.suffix

    def paths(self, directory: Path) -> list[Path]:
        """The files in `directory`, sorted; none if there is no such directory. Raises OSError."""
        return paths_of(directory, self.suffix)

    def read(
        self,
        path: Path,
        parse: Callable[[bytes], list[T]],
        skipped: Callable[[OSError | ArtifactInvalid | ValueError], None],
    ) -> list[T] | None:
        """The items that ``parse(content)`` returns; None if the file is gone.

        Empty, after ``skipped(error)``, if the file cannot be read, or `parse` raises `ArtifactInvalid` or ValueError.
        """
        try:
            return parse(read_plain(path, self.largest))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # the latter on NFS v3
                return None
            skipped(error)
        except (ArtifactInvalid, ValueError) as error:
            skipped(error)
        return []


def times_of_profiles(root: Path) -> dict[str, float]:
    """The profiles that have a directory in `root`, and when each got its last part. Raises `StoreError`."""
    found = {}
    for name in profiles_in(root):
        with suppress(OSError):
            found[name] = (root / name).stat().st_mtime
    return found


def profiles_in(root: Path, *, follow_symlinks: bool = False) -> list[str]:
    """The names of the profiles that have a directory in `root`, sorted; none if there is no `root`. Raises `StoreError`."""
    names: list[str] = []
    with store_errors(root), suppress(FileNotFoundError):
        names = [p.name for p in root.iterdir() if p.is_dir() and (follow_symlinks or not p.is_symlink())]
    return sorted(filter(is_profile_name, names))
