"""A directory of source files by its content, for compilers that read templates or headers from disk.

A fingerprint holds the relative names and the contents of the files, and not the directory's path. Each file's hash is
cached on this machine under its stamp (`kcoord.keys.tools.machine_cache`): the fingerprint of an unchanged tree lists and stats
its files, and reads none.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.tools.machine_cache import Stamp, cached, hash_file, stamp_of

_COMPILED = (b".pyc", b".pyo")
_NO_SOURCES = frozenset({b".git", b".hg", b".svn", b"__pycache__"})
_LEADS_NOWHERE = (errno.ENOENT, errno.ELOOP)

Listed = tuple[bytes, bytes, "Stamp | None"]
"""A relative name, the path of a file and its stamp; or a text for a name that is no file, and None."""

_known: dict[str, tuple[list[Listed], str]] = {}
"""The last listing of a root and its fingerprint, if none of its files may still change unseen."""


def tree_fingerprint(root: str | os.PathLike[str], local_dir: Path) -> str:
    """The SHA-256, in hex, of the files below `root`, or of the one file `root`; equal wherever an equal tree lies.

    Left out are ``.git``, ``.hg``, ``.svn``, ``__pycache__``, compiled Python and special files. A symbolic link counts as its
    target; loops end. `local_dir` is `Settings.local_dir`.

    Raises `KeyFactorError` if `root` is missing or a part of it cannot be read. Not guaranteed: that all files are looked at in
    one moment.
    """
    root = os.path.abspath(root)  # noqa: PTH100 - what follows is about names by the thousand
    known = _known.get(root)
    try:
        listing = listing_of(root)
        if known is not None and known[0] == listing:
            return known[1]
        hashes, settled = _hashes(root, listing, local_dir)
    except OSError as error:
        raise KeyFactorError(_unreadable(error, root)) from error
    digest = hashlib.sha256()
    for name, stands_for, stamp in listing:
        value = stands_for if stamp is None else hashes[name].encode()
        digest.update(b"%d:%b%d:%b" % (len(name), name, len(value), value))
    fingerprint = digest.hexdigest()
    if settled:
        _known[root] = listing, fingerprint
    return fingerprint


def tree_factors(trees: Iterable[str | os.PathLike[str]], local_dir: Path) -> dict[str, str]:
    """The fingerprint of each tree, by its last name, wherever it lies; two of one name are told apart by their order.

    Raises as `tree_fingerprint` does.
    """
    found: dict[str, str] = {}
    for tree in trees:
        name = Path(tree).name
        while name in found:
            name += "'"
        found[name] = tree_fingerprint(tree, local_dir)
    return found


def listing_of(root: str, patterns: tuple[str, ...] = ("*",)) -> list[Listed]:
    """The entries that `tree_fingerprint` hashes, in the order of names. `patterns` are of file names. Raises OSError."""
    found = os.stat(root)  # noqa: PTH116
    if stat.S_ISREG(found.st_mode):
        return [(b"", os.fsencode(root), stamp_of(found))]
    if not stat.S_ISDIR(found.st_mode):  # to open a pipe would wait for ever
        raise OSError(errno.EINVAL, "it is neither a file nor a directory", root)
    matches = re.compile(os.fsencode("|".join(map(fnmatch.translate, patterns)))).match
    return list(_walk(os.fsencode(root), b"", matches, {(found.st_dev, found.st_ino): b"."}))


def _walk(
    directory: bytes, prefix: bytes, matches: Callable[[bytes], object], seen: dict[tuple[int, int], bytes]
) -> Iterator[Listed]:
    """The entries of `directory`, in the order of names. A directory met again, as in a loop, is named and not walked."""
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.name in _NO_SOURCES:
            continue
        name = prefix + entry.name
        try:
            is_directory = entry.is_dir()
            if not (is_directory or matches(entry.name)):
                continue
            status = entry.stat()
        except OSError as error:
            if error.errno not in _LEADS_NOWHERE:
                raise
            if entry.is_symlink():
                yield name, b"leads nowhere", None
            continue  # or it vanished just now
        if is_directory:
            first = seen.setdefault((status.st_dev, status.st_ino), name)
            if first is name:
                yield from _walk(entry.path, name + b"/", matches, seen)
            else:
                yield name, b"the same directory as " + first, None
        elif entry.is_file() and not entry.name.endswith(_COMPILED):
            yield name, entry.path, stamp_of(status)


def _hashes(root: str, listing: list[Listed], local_dir: Path) -> tuple[dict[bytes, str], bool]:
    """Each file's SHA-256 by name, and whether each file's next change gives it a new stamp. Raises OSError."""

    def hash_in(entry: Any, name: bytes, stamp: Stamp) -> str | None:
        cached_stamp, sha256 = (entry or {}).get(name, ((), None))
        return sha256 if tuple(cached_stamp) == stamp else None

    def load(entry: Any) -> tuple[dict[bytes, str], bool] | None:
        hashes = {name: hash_in(entry, name, stamp) for name, _, stamp in listing if stamp is not None}
        found = {name: sha256 for name, sha256 in hashes.items() if sha256 is not None}
        return (found, True) if len(found) == len(hashes) else None

    def compute(entry: Any) -> tuple[tuple[dict[bytes, str], bool], Any]:
        hashes, keep = {}, {}
        for name, path, stamp in listing:
            if stamp is None:
                continue
            sha256 = hash_in(entry, name, stamp)
            settled: Stamp | None = stamp
            if sha256 is None:
                sha256, settled = hash_file(path)
            hashes[name] = sha256
            if settled is not None:
                keep[name] = (settled, sha256)
        return (hashes, len(keep) == len(hashes)), keep

    entry_name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    return cached(local_dir, f"tree-{entry_name}", load, compute)


def _unreadable(error: OSError, root: str) -> str:
    path = os.fsdecode(error.filename or root)
    if error.errno == errno.ENOENT:
        return f"{path} is missing: name a directory or file that exists when the key is made"
    return f"{path} cannot be read ({error.strerror}): let this user read it"
