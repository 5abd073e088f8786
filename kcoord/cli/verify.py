"""``kcoord verify``: check every byte and every signature of the artifacts in the store or on this node."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import click
from rich.progress import MofNCompleteColumn

from kcoord.artifacts import local
from kcoord.artifacts.catalog import local_manifests
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.signing import MANIFEST, Trust, split
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.options import DIGEST, IN_STORE, print_json, subcommand
from kcoord.cli.output import echo
from kcoord.cli.transfer import bar
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.files.faults import store_errors
from kcoord.packs.index import PackInvalid
from kcoord.packs.pack import Pack
from kcoord.packs.pack_files import all_packs
from kcoord.settings import Settings
from kcoord.units import several

_MOST_SHOWN = 200
_DIGITS = 64


@dataclass
class _Seen:
    """`whole`: artifacts, in packs apart."""

    whole: int = 0
    packs: int = 0
    signed: int = 0
    size: int = 0


@subcommand("verify", *IN_STORE, "local_dir")
@click.argument("digests", metavar="[DIGEST]…", nargs=-1, type=DIGEST)
@click.option("--all", "everything", is_flag=True, help="All artifacts, the default.")
@click.option("--local", "on_node", is_flag=True, help="The artifacts on this node instead of those in the store.")
def command(settings: Settings, digests: tuple[str, ...], everything: bool, on_node: bool, as_json: bool) -> None:
    """Check every byte of all artifacts, or of those whose keys begin with a DIGEST. Names those that are bad; then the exit code
    is 1.

    Signatures in the store are checked, too: with KCOORD_TRUST=require an artifact without a signature by one of our keys is bad.
    So are the packs of profiles, unless each DIGEST is named. Nothing is moved or removed.
    """
    if everything and digests:
        raise click.UsageError("give either --all or each DIGEST")
    seen, bad = _Seen(), {}
    root = settings.store_root
    if on_node or root is None:
        where, checks = settings.local_dir, _on_node(settings, digests, seen)
    else:
        check_is_store(root)
        trust = Trust.of(settings)
        where, checks = root, _in_store(Store(root), trust, digests, seen)
        if not digests:
            checks = chain(checks, _packs(Store(root, trust), seen))
    missing = set(digests)
    with bar("verify", MofNCompleteColumn(), quiet=as_json) as progress:
        for number, (digest, place, check) in enumerate(checks, 1):
            missing -= {each for each in missing if digest.startswith(each)}
            try:
                check()
            except ArtifactDistrusted as error:
                bad[place] = f"{error.fault}: {error.remedy}"
            except (ArtifactInvalid, PackInvalid, StoreError) as error:
                bad[place] = str(error)  # a bad sector of a disk leaves the other artifacts
            progress(number, None)
    for digest in sorted(missing):
        bad[digest] = f"it is not in {where}"
    _print(seen, bad, where, as_json)
    sys.exit(1 if bad else 0)


_Check = tuple[str, str, Callable[[], object]]
"""A digest, its place, and a function that raises `ArtifactInvalid` if the artifact is not whole."""


def _in_store(store: Store, trust: Trust, digests: tuple[str, ...], seen: _Seen) -> Iterator[_Check]:
    def check(digest: str) -> None:
        found = store.object(digest)
        if found is None:
            raise ArtifactInvalid("it is missing, or was removed this moment")
        encoded = found.encoded
        seen.size += found.size
        signature = split(encoded)[1]
        if signature is not None:
            seen.signed += 1
        judge = trust
        if signature is not None and signature.key_id in trust.keys:
            judge = Trust("require", trust.keys)  # a wrong signature is bad under any policy
        doubt = judge.doubt(MANIFEST, encoded)
        if doubt is not None:
            raise doubt
        seen.whole += 1

    whole = bool(digests) and all(len(digest) == _DIGITS for digest in digests)
    for digest in digests if whole else store.digests():
        if not digests or digest.startswith(digests):
            yield digest, str(store.home(digest)), functools.partial(check, digest)


def _packs(store: Store, seen: _Seen) -> Iterator[_Check]:
    def check(path: Path, size: int) -> None:
        try:
            pack = Pack(path, store)
        except StoreError:
            if path.exists():
                raise
            return  # a job has just replaced it
        with pack:
            pack.verify()
        seen.packs += 1
        seen.size += size

    with store_errors(store.root):
        for path, found in all_packs(store.root):
            yield "", str(path), functools.partial(check, path, found.st_size)


def _on_node(settings: Settings, digests: tuple[str, ...], seen: _Seen) -> Iterator[_Check]:
    def check(home: Path) -> None:
        artifact = local.open_artifact(home, home.name if len(home.name) == _DIGITS else None)
        if artifact is None:
            raise ArtifactInvalid("it was removed this moment")
        seen.size += artifact.manifest.size
        seen.whole += 1

    for path in local_manifests(settings.local_dir):
        digest = _stated(path.parent)
        if not digests or digest.startswith(digests):
            yield digest, str(path.parent), functools.partial(check, path.parent)


def _stated(home: Path) -> str:
    """The digest that an artifact's manifest states; if it cannot be read, its directory's name."""
    try:
        return Manifest.read(home).key.digest
    except (ArtifactInvalid, OSError):
        return home.name


def _print(seen: _Seen, bad: dict[str, str], where: Path, as_json: bool) -> None:
    if as_json:
        counts = {"whole": seen.whole, "packs": seen.packs, "signed": seen.signed, "bytes": seen.size}
        print_json({**counts, "bad": bad, "where": str(where)})
        return
    for place, fault in list(bad.items())[:_MOST_SHOWN]:
        echo(f"bad: {place}: {fault}", err=True)
    if len(bad) > _MOST_SHOWN:
        echo(f"… and {len(bad) - _MOST_SHOWN} more: --json names all", err=True)
    packs = f" and {several(seen.packs, 'pack')}" if seen.packs else ""
    echo(
        f"{several(seen.whole, 'artifact')}{packs} verified, {len(bad)} bad, {seen.size:,} bytes read, "
        f"{seen.signed} signed by any key, in {where}"
    )
