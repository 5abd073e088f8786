"""Toolchains in the store: their records, which are choices, and the names that people give them.

A name is the file ``<store>/v2/toolchains/<NAME>.toolchain``, a copy of the record, signed as artifacts are. Retention does not
remove it, and a launcher finds it without a list of artifacts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.choices import LARGEST_CHOICE, content_of
from kcoord.artifacts.signing import OVERHEAD, split
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT, replace_file
from kcoord.files.faults import store_errors
from kcoord.files.reading import read_plain
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.tools.record import BACKEND, Toolchain

_SUFFIX = ".toolchain"
_MOST_NAMED = 1000
DIGEST = re.compile(r"[0-9a-f]{12,64}")


def toolchains(store: Store) -> dict[str, Toolchain]:
    """All that the store has, by digest. It lists directories: never on a job's way. Raises `StoreError`."""
    found = {each.key.digest: each for each in named(store).values()}
    for digest in store.digests():
        manifest = store.readable_manifest(digest)
        if manifest is not None and manifest.key.backend == BACKEND:
            with suppress(ArtifactInvalid, ValueError):
                found[digest] = _recorded(store, digest)
    return found


def named(store: Store) -> dict[str, Toolchain]:
    """Those that people have given a name, by it. Raises `StoreError`."""
    directory, result = store.root / LAYOUT / "toolchains", dict[str, Toolchain]()
    with store_errors(directory), suppress(FileNotFoundError):
        for file, _ in sorted(beneath.listed(directory, store.root))[:_MOST_NAMED]:
            name = file.removesuffix(_SUFFIX)
            with suppress(ArtifactInvalid):
                result |= {name: _read(store, name)} if name != file else {}
    return result


def found(store: Store, text: str) -> Toolchain:
    """The toolchain of this name, or whose digest begins so. Raises `StoreError`, and `ArtifactInvalid` if it is not trusted."""
    if not DIGEST.fullmatch(text):
        return _read(store, text)
    bucket = store.home(text).parent
    with store_errors(bucket):
        digests = [name for name, _ in beneath.listed(bucket, store.root) if name.startswith(text)]
    if len(digests) != 1:
        raise StoreError(f"{store.root}: {len(digests)} toolchains begin with {text}: see 'kcoord toolchain ls'")
    try:
        return _recorded(store, digests[0])
    except ValueError as error:
        raise ArtifactInvalid(f"{digests[0]}: {error}") from None


def give_name(store: Store, toolchain: Toolchain, name: str) -> None:
    """Raises `StoreError`."""
    path = _path(store, name)
    with store_errors(path.parent):
        with suppress(FileExistsError):
            beneath.mkdir(path.parent, store.root)
        content = store.trust.seal(BACKEND, toolchain.encode())
        replace_file(path, content, store.root / LAYOUT / "staging", store.root, durable=True)


def _recorded(store: Store, digest: str) -> Toolchain:
    fetched = store.fetch(digest)
    if fetched is None:
        raise ValueError("the store has none")
    return Toolchain.decode(content_of("a toolchain", fetched[1]), digest)


def _read(store: Store, name: str) -> Toolchain:
    path = _path(store, name)
    with store_errors(path):
        try:
            sealed = read_plain(path, LARGEST_CHOICE + OVERHEAD)
        except FileNotFoundError:
            raise StoreError(
                f"{store.root}: no toolchain has the name {name}: 'kcoord toolchain ls' lists them"
            ) from None
    if doubt := store.trust.doubt(BACKEND, sealed):
        raise doubt
    try:
        return Toolchain.decode(split(sealed)[0])
    except ValueError as error:
        raise ArtifactInvalid(f"{path}: {error}") from None


def _path(store: Store, name: str) -> Path:
    return store.root / LAYOUT / "toolchains" / f"{name}{_SUFFIX}"


# Artifacts that were made with a toolchain.

Contents = frozenset[tuple[str, str]]
"""Of one compiler: the SHA-256 of it and of what it runs, by label."""


def contents(tools: Mapping[str, str]) -> Contents:
    return frozenset((label.partition("/")[2], sha256) for label, sha256 in tools.items())


def compilers_in(key: CacheKey) -> Iterator[Contents]:
    """The compilers, and other files, that are in the factor `tools` of a key."""
    parts = next((factor.parts for factor in key.factors if factor.name == "tools"), ())
    grouped: dict[str, dict[str, str]] = defaultdict(dict)
    for part in parts:
        grouped[part.name.partition("/")[0]][part.name] = part.text
    yield from map(contents, grouped.values())
