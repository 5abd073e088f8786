"""Replacing a small file whole or not at all: its content is written under another name, which is renamed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kcoord.files import beneath
from kcoord.files.naming import staging_name
from kcoord.files.rename import sync_directory, write_file


def replace_file(
    path: Path,
    content: bytes,
    staging: Path | None = None,
    root: Path | None = None,
    *,
    durable: bool = False,
) -> None:
    """Make `content` the file at `path`. It is written to `staging` first, a directory of the same file system.

    Without `staging`, to a hidden file beside `path`. `durable`: the content and the name survive a crash. No directory is made:
    where a mount has vanished it would be made on the disk below. Both lie below `root` (`kcoord.files.beneath`). Raises OSError;
    nothing is left in `staging` then.
    """
    fresh = path.with_name(f".{staging_name()}") if staging is None else staging / f"{staging_name()}.part"
    staged = True
    if root is not None:
        beneath.check(fresh.parent, root)
    try:
        write_file(fresh, content, durable=durable)
        beneath.rename(fresh, path, root)
        staged = False
        if durable:
            sync_directory(path.parent)
    finally:
        if staged:
            with suppress(OSError):
                beneath.unlink(fresh, root)
