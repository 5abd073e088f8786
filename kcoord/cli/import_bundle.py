"""``kcoord import``: put the artifacts and profiles of a pack that `kcoord export` wrote into the store."""

from __future__ import annotations

from pathlib import Path

import click

from kcoord.artifacts.signing import OFF, Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.console import bar
from kcoord.cli.options import IN_STORE, needed_store, print_json, subcommand
from kcoord.cli.output import echo
from kcoord.packs.exchange import decode_profile, import_artifacts
from kcoord.packs.index import PackInvalid, Use
from kcoord.packs.pack import Pack
from kcoord.packs.recipe import Recipe, today
from kcoord.packs.recipe_files import parts, roots, save_part
from kcoord.packs.writing import added, own_pack, write_pack
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


@subcommand("import", *IN_STORE)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def command(settings: Settings, file: Path, as_json: bool) -> None:
    """Put the artifacts and profiles of FILE into the store.

    Every byte, and with KCOORD_TRUST=require the signature, is verified before anything is written. Artifacts that the store has
    are kept.
    """
    if not file.exists():
        raise click.BadParameter(f"File '{file}' does not exist.", param_hint="'FILE'")
    root, trust = needed_store(settings), Trust.of(settings)
    store = Store(root, trust)
    check_is_store(store.root, or_new=settings.store_create)
    with Pack(file, store) as pack:
        with bar(f"verify {file.name}", quiet=as_json) as progress:
            pack.verify(progress)
        profiles = {name: _decoded(file, name, text) for name, text in pack.profiles()}
        store.open()
        with bar(f"import {file.name}", quiet=as_json) as progress:
            done = import_artifacts(pack, store, progress)
        places = {use.digest: use.place for use in pack.index.uses}
        for name, (recipes, digests) in profiles.items():
            _save_recipes(store, name, recipes, vouched=pack.vouched)
            if pack.vouched:  # else the store's pack would be signed by the import
                _save_uses(store, name, [Use(digest, places.get(digest, ""), today()) for digest in digests])
    if as_json:
        print_json({"published": done.published, "kept": done.kept, "profiles": sorted(profiles)})
    else:
        echo(f"{done.published} artifacts published and {done.kept} kept, {len(profiles)} profiles, in {store.root}")


def _decoded(file: Path, name: str, text: bytes) -> tuple[list[Recipe], list[str]]:
    try:
        return decode_profile(text)
    except ValueError as error:
        raise PackInvalid(f"{file}: the profile {name}: {error}") from error


def _save_recipes(store: Store, name: str, recipes: list[Recipe], *, vouched: bool) -> None:
    """Without `vouched`, a signature by one of our keys, nothing is signed by the import, and nothing signed is replaced."""
    directory = roots(store.root, store.root)[0] / name
    if not vouched:
        signed = {r.digest for r in parts(directory, Notices(), Trust("require", store.trust.keys))}
        recipes = [r for r in recipes if r.digest not in signed]
    if recipes:
        save_part(
            directory, [r.measured(r.seconds, r.order, today()) for r in recipes], trust=store.trust if vouched else OFF
        )


def _save_uses(store: Store, name: str, uses: list[Use]) -> None:
    """Add `uses` to the profile's pack. Raises `KcoordError`."""
    if uses:
        earlier = own_pack(store, name)
        write_pack(store, name, added(uses, earlier, since=0))
        if earlier is not None:
            earlier.close()
