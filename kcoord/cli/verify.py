"""``kcoord verify``: every byte, and every signature, of the artifacts in the store or on this node."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.progress import MofNCompleteColumn

from kcoord.artifacts import local
from kcoord.artifacts.catalog import local_manifests
from kcoord.artifacts.manifest import LARGEST_MANIFEST, Manifest
from kcoord.artifacts.signing import MANIFEST, Trust, split
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.options import json_flag, print_json, settings_flags
from kcoord.cli.transfer import bar
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.files.reading import read_plain
from kcoord.settings import Settings

_MOST_SHOWN = 200
_DIGITS = 64


@dataclass
class _Seen:
    whole: int = 0
    signed: int = 0
    size: int = 0


@click.command("verify")
@click.argument("digests", metavar="[DIGEST]…", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All artifacts: also what is meant if no DIGEST is given.")
@click.option("--local", "on_node", is_flag=True, help="Those on this node, rather than those in the store.")
@json_flag
@settings_flags("store", "local_dir", "namespace", "trust", "signing_key_file")
def command(digests: tuple[str, ...], everything: bool, on_node: bool, as_json: bool, **flags: str | None) -> None:
    """Read every byte of artifacts, by the DIGEST of their keys, and check it. Exit code 1 names each that is not whole, or that
    cannot be read.

    In the store, signatures are checked too: with KCOORD_TRUST=require, or =warn, each that no key of ours has made is bad; with
    a key, a wrong one always is. Nothing is moved or removed.
    """
    settings = Settings.from_environ(**flags)
    if everything and digests:
        raise click.UsageError("say either --all or which DIGEST")
    for digest in digests:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise click.BadParameter(f"{digest!r:.80} is no digest of a key: 'kcoord ls --json' has them")
    seen, bad = _Seen(), {}
    root = settings.store_root
    if on_node or root is None:
        where, checks = settings.local_dir, _on_node(settings, set(digests), seen)
    else:
        check_is_store(root)
        where, checks = root, _in_store(Store(root), Trust.of(settings), digests, seen)
    missing = set(digests)
    with bar("verify", MofNCompleteColumn(), quiet=as_json) as progress:
        for number, (digest, place, check) in enumerate(checks, 1):
            missing.discard(digest)
            try:
                check()
                seen.whole += 1
            except ArtifactDistrusted as error:
                bad[place] = f"{error.fault}: {error.remedy}"
            except (ArtifactInvalid, StoreError) as error:  # a disk with a bad sector has good ones
                bad[place] = str(error)
            progress(number, None)
    for digest in sorted(missing):
        bad[digest] = f"it is not in {where}"
    _say(seen, bad, where, as_json)
    sys.exit(1 if bad else 0)


_Check = tuple[str, str, Callable[[], object]]
"""A digest, where it lies, and what raises `ArtifactInvalid` if it is not whole."""


def _in_store(store: Store, trust: Trust, digests: tuple[str, ...], seen: _Seen) -> Iterator[_Check]:
    strict = Trust("require" if trust.policy == "warn" else trust.policy, trust.keys)

    def check(digest: str) -> None:
        found = store.files(digest)
        if found is None:
            raise ArtifactInvalid("it is not there, or was removed this moment")
        _, encoded, payload = found
        seen.size += len(encoded) + len(payload)
        signature = split(encoded)[1]
        if signature is not None:
            seen.signed += 1
        judge = strict
        if signature is not None and signature.key_id in trust.keys:
            judge = Trust("require", trust.keys)  # a wrong one is bad under any policy
        doubt = judge.doubt(MANIFEST, encoded)
        if doubt is not None:
            raise doubt

    for digest in digests or store.digests():
        yield digest, str(store.home(digest)), functools.partial(check, digest)


def _on_node(settings: Settings, digests: set[str], seen: _Seen) -> Iterator[_Check]:
    def check(home: Path) -> None:
        artifact = local.open_artifact(home, home.name if len(home.name) == _DIGITS else None)
        if artifact is None:
            raise ArtifactInvalid("it was removed this moment")
        seen.size += artifact.manifest.size

    for path in local_manifests(settings.local_dir):
        digest = _stated(path)
        if not digests or digest in digests:
            yield digest, str(path.parent), functools.partial(check, path.parent)


def _stated(manifest: Path) -> str:
    """The digest that a manifest says it is of; of one that cannot be read, its directory's name."""
    try:
        return Manifest.decode(read_plain(manifest, LARGEST_MANIFEST)).key.digest
    except (ArtifactInvalid, OSError):
        return manifest.parent.name


def _say(seen: _Seen, bad: dict[str, str], where: Path, as_json: bool) -> None:
    if as_json:
        print_json({"whole": seen.whole, "signed": seen.signed, "bytes": seen.size, "bad": bad, "where": str(where)})
        return
    for place, why in list(bad.items())[:_MOST_SHOWN]:
        click.echo(f"bad: {place}: {why}", err=True)
    if len(bad) > _MOST_SHOWN:
        click.echo(f"… and {len(bad) - _MOST_SHOWN} more: --json names all", err=True)
    click.echo(
        f"{seen.whole} artifacts verified, {len(bad)} bad, {seen.size:,} bytes read, {seen.signed} signed by whomever, in {where}"
    )
