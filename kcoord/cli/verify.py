"""``kcoord verify``: check every byte and every signature of the artifacts in the store or on this node."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import click
from rich.progress import MofNCompleteColumn

from kcoord.artifacts import local
from kcoord.artifacts.catalog import local_manifests
from kcoord.artifacts.signing import MANIFEST, UNSIGNED, Trust, split
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.console import bar
from kcoord.cli.options import IN_STORE, print_json, subcommand
from kcoord.cli.output import echo
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.files.faults import store_errors
from kcoord.packs.index import PackDistrusted, PackInvalid
from kcoord.packs.pack import Pack
from kcoord.packs.pack_files import all_packs
from kcoord.settings import Settings
from kcoord.units import several

_DIGITS = 64


@dataclass
class _Seen:
    """`whole`: artifacts that are not damaged, without those in packs."""

    whole: int = 0
    packs: int = 0
    signed: int = 0
    bytes: int = 0


_Check = tuple[Path, Callable[[], object]]
"""A place, and a function that raises an error if what lies there is not whole."""


@subcommand("verify", *IN_STORE, "local_dir")
@click.option("--local", "on_node", is_flag=True, help="The artifacts on this node instead of those in the store.")
def command(settings: Settings, on_node: bool, as_json: bool) -> None:
    """Check every byte of all artifacts. Names those that are bad, or not trusted; then the exit code is 1.

    Signatures in the store are checked, too: with KCOORD_TRUST=require an artifact without a signature by one of our keys is not
    trusted. The packs of profiles are checked, too. Nothing is moved or removed.
    """
    seen, bad = _Seen(), {}
    strangers = set()  # of the bad ones; they may be whole
    root = settings.store_root
    if on_node or root is None:
        where, checks = settings.local_dir, _on_node(settings, seen)
    else:
        check_is_store(root)
        store = Store(root, Trust.of(settings))
        where, checks = root, chain(_in_store(store, seen), _packs(store, seen))
    with bar("verify", MofNCompleteColumn(), quiet=as_json) as progress:
        for number, (place, check) in enumerate(checks, 1):
            try:
                check()
            except ArtifactDistrusted as error:
                bad[str(place)] = f"{error.fault}: {error.remedy}"
                if error.unknown_key or error.fault == UNSIGNED:
                    strangers.add(str(place))
            except (ArtifactInvalid, PackInvalid, StoreError) as error:
                # a bad sector of a disk leaves the other artifacts
                bad[str(place)] = str(error).removeprefix(f"{place}: ")
                if isinstance(error, PackDistrusted):
                    strangers.add(str(place))
            progress(number, None)
    if as_json:
        print_json({**asdict(seen), "bad": bad, "where": str(where)})
    else:
        for name, fault in bad.items():
            echo(f"{'not trusted' if name in strangers else 'bad'}: {name}: {fault}", err=True)
        packs = f" and {several(seen.packs, 'pack')}" if seen.packs else ""
        others = f", {len(strangers)} not signed by a key that is known here" if strangers else ""
        echo(
            f"{several(seen.whole, 'artifact')}{packs} verified, {len(bad) - len(strangers)} bad{others}, "
            f"{seen.bytes:,} bytes read, {seen.signed} signed by any key, in {where}"
        )
    sys.exit(1 if bad else 0)


def _in_store(store: Store, seen: _Seen) -> Iterator[_Check]:
    unjudged, trust = Store(store.root), store.trust

    def check(digest: str) -> None:
        found = unjudged.object(digest)
        if found is None:
            raise ArtifactInvalid("it is missing, or was removed this moment")
        seen.bytes += found.size
        signature = split(found.encoded)[1]
        if signature is not None:
            seen.signed += 1
        # a wrong signature is bad under any policy
        is_ours = signature is not None and signature.key_id in trust.keys
        judge = Trust("require", trust.keys) if is_ours else trust
        doubt = judge.doubt(MANIFEST, found.encoded)
        if doubt is not None:
            raise doubt
        seen.whole += 1

    for digest in store.digests():
        yield store.home(digest), functools.partial(check, digest)


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
        seen.bytes += size

    with store_errors(store.root):
        for path, found in all_packs(store.root):
            yield path, functools.partial(check, path, found.st_size)


def _on_node(settings: Settings, seen: _Seen) -> Iterator[_Check]:
    def check(home: Path) -> None:
        artifact = local.open_artifact(home, home.name if len(home.name) == _DIGITS else None)
        if artifact is None:
            raise ArtifactInvalid("it was removed this moment")
        seen.bytes += artifact.manifest.size
        seen.whole += 1

    for path in local_manifests(settings.local_dir):
        yield path.parent, functools.partial(check, path.parent)
