"""``kcoord export``: artifacts and profiles of the store as one file, for another store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.progress import MofNCompleteColumn

from kcoord.artifacts import local
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.console import bar
from kcoord.cli.options import IN_STORE, PROFILE, Parsed, needed_store, print_json, subcommand
from kcoord.cli.output import echo
from kcoord.errors import KcoordError, StoreError
from kcoord.packs.exchange import encode_profile, export
from kcoord.packs.index import Use
from kcoord.packs.pack_files import packs_directory
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import load_profile, profile_names, profiles_in
from kcoord.packs.writing import own_pack
from kcoord.settings import Settings

_MOST_SHOWN = 20


def _file(text: str) -> Path:
    if not Path(text).name:
        raise ValueError("it names no file")
    return Path(text)


@subcommand("export", *IN_STORE, "local_dir")
@click.argument("names", metavar="[NAME]…", nargs=-1, type=PROFILE)
@click.argument("out", metavar="FILE", type=Parsed("file", _file))
@click.option(
    "--all", "everything", is_flag=True, help="All artifacts of the store, and all profiles that it or this node has."
)
def command(settings: Settings, names: tuple[str, ...], out: Path, everything: bool, as_json: bool) -> None:
    """Write the profiles NAME, and the artifacts that their jobs used, into one FILE for `kcoord import`.

    The file is signed if there is a signing key, and then holds what known keys have signed.
    """
    root = needed_store(settings)
    if not (names or everything):
        raise click.UsageError("nothing to export: give the NAME of a profile, or --all")
    if names and everything:
        raise click.UsageError("--all has every profile: leave the NAME out")
    store = Store(root, Trust.of(settings))
    check_is_store(store.root)
    uses: dict[str, Use] = {}
    if everything:
        uses = {digest: Use(digest, local.place_of(digest)) for digest in store.digests()}
        names = tuple(sorted({*profile_names(settings), *profiles_in(packs_directory(store.root, ""))}))
    profiles, unread = {}, {}
    signed_only = replace(settings, trust="require") if store.trust.keys else settings
    for name in names:
        try:
            used = _used(store, name)
            profiles[name] = encode_profile(_recipes(signed_only, name, bool(used)), (use.digest for use in used))
            uses |= {use.digest: use for use in used}
        except StoreError:
            raise
        except KcoordError as error:
            if not everything:
                raise
            unread[f"profile {name}"] = str(error)  # an unsigned one, say: the others are exported
    with bar(f"export {out.name}", MofNCompleteColumn(), quiet=as_json) as progress:
        done = export(store, uses.values(), profiles, out, progress)
    left_out = unread | done.left_out
    if as_json:
        print_json({"file": str(out), "artifacts": done.artifacts, "profiles": sorted(profiles), "bytes": done.size,
                    "left_out": left_out, "signed": bool(store.trust.signer)})  # fmt: skip
    else:
        missing = f"; {len(left_out)} left out" if left_out else ""
        for name, reason in list(left_out.items())[:_MOST_SHOWN]:
            echo(f"left out: {name if name in unread else name[:12]}: {reason}", err=True)
        signed = "signed" if store.trust.signer else "not signed"
        echo(
            f"{done.artifacts} artifacts and {done.profiles} profiles, {done.size:,} bytes, {signed}, in {out}{missing}"
        )


def _used(store: Store, profile: str) -> list[Use]:
    """The artifacts that the profile's newest pack lists; none if there is no pack. Raises `KcoordError`."""
    pack = own_pack(store, profile)
    if pack is None:
        return []
    with pack:
        return pack.index.uses


def _recipes(settings: Settings, name: str, needed: bool) -> list[Recipe]:
    """The recipes of a profile. A job of the generic API alone records none, and uses artifacts all the same."""
    if needed and name not in profile_names(settings):
        return []
    return load_profile(settings, name)
