"""``kcoord export``: artifacts and profiles of the store as one file, for another cluster's store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import click

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.options import IN_STORE, json_flag, print_json, settings_flags
from kcoord.cli.transfer import bar
from kcoord.errors import KcoordError, SettingsError, StoreError
from kcoord.profiles import document
from kcoord.profiles.parts import load_profile, profile_names
from kcoord.profiles.recipe import Recipe
from kcoord.profiles.requested import load_requested, requested_directory, requested_profiles
from kcoord.settings import Settings, profile_name
from kcoord.transfer.bundle import export

_MOST_SHOWN = 20


@click.command("export")
@click.argument("names", metavar="[NAME]…", nargs=-1)
@click.argument("out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--all", "everything", is_flag=True, help="All artifacts and all profiles of the store.")
@click.option("--key", "keys", metavar="DIGEST", multiple=True, help="This artifact, by its key's digest or the beginning of it "
              "(`kcoord ls`); may be repeated.")  # fmt: skip
@json_flag
@settings_flags(*IN_STORE, "local_dir")
def command(
    names: tuple[str, ...], out: Path, everything: bool, keys: tuple[str, ...], as_json: bool, **flags: str | None
) -> None:
    """Write the profiles NAME, and the artifacts that their jobs asked for, into one FILE for `kcoord import`.

    Which artifacts these are is what agents have noted while the profile was recorded. The file is signed if there is a signing
    key. The same artifacts make the same file.
    """
    settings = Settings.from_environ(**flags)
    if not out.name:
        raise click.BadParameter("it names no file", param_hint="FILE")
    for name in names:
        try:
            profile_name(name)
        except ValueError as error:  # a path may well lead to a profile, and no import would take its name
            raise click.BadParameter(f"{name!r:.80} is no profile's name: {error}", param_hint="NAME") from None
    if settings.store_root is None:
        raise SettingsError("kcoord export reads the store: set KCOORD_STORE (--store)")
    if not (names or everything or keys):
        raise click.UsageError("say what to export: the NAME of a profile, --key DIGEST or --all")
    store = Store(settings.store_root, Trust.of(settings))
    check_is_store(store.root)
    named = _found(store, keys)
    digests = set(named)
    if everything:
        digests |= set(store.digests())
        names = tuple(sorted({*profile_names(settings), *requested_profiles(store.root)}))
    profiles, unread = {}, {}
    for name in names:
        needs = load_requested(requested_directory(store.root, name))
        try:
            profiles[name] = document.encode(_recipes(settings, name, bool(needs)), needs)
        except StoreError:
            raise
        except KcoordError as error:
            if not everything:
                raise
            unread[f"profile {name}"] = str(error)  # one that nobody vouches for keeps the others from nothing
            continue
        digests |= {need.digest for need in needs}
    with bar(f"export {out.name}", quiet=as_json) as progress:
        done = export(store, digests, profiles, out, progress)
    left_out = unread | done.left_out
    if as_json:
        print_json({"file": str(out), "artifacts": done.artifacts, "profiles": sorted(profiles), "bytes": done.size,
                    "left_out": left_out, "signed": bool(store.trust.keys)})  # fmt: skip
    else:
        missing = f"; {len(left_out)} left out" if left_out else ""
        for what, why in list(left_out.items())[:_MOST_SHOWN]:
            click.echo(f"left out: {what if what in unread else what[:12]}: {why}", err=True)
        signed = "signed" if store.trust.keys else "not signed"
        click.echo(
            f"{done.artifacts} artifacts and {done.profiles} profiles, {done.size:,} bytes, {signed}, in {out}{missing}"
        )
    if not done.left_out.keys().isdisjoint(named):
        raise KcoordError("an artifact that was named is left out: see above, and 'kcoord verify'")


def _recipes(settings: Settings, name: str, needed: bool) -> list[Recipe]:
    """A job of the generic API alone records no recipes, and has needs all the same."""
    if needed and name not in profile_names(settings):
        return []
    return load_profile(settings, name)


def _found(store: Store, keys: Iterable[str]) -> list[str]:
    """Raises `KcoordError` if one is not there, or not the only one that begins so."""
    wanted = []
    for key in keys:
        if not re.fullmatch(r"[0-9a-f]{4,64}", key):
            raise click.BadParameter(f"{key!r} is no digest: 4 to 64 hex digits", param_hint="--key")
        if len(key) == 64:
            there = [key] if store.manifest_file(key) is not None else []
        else:
            there = [d for d in store.digests() if d.startswith(key)]
        if len(there) != 1:
            raise KcoordError(f"{len(there)} artifacts in {store.root} begin with {key}: 'kcoord ls' has their digests")
        wanted += there
    return wanted
