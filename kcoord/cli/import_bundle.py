"""``kcoord import``: put the artifacts and profiles of a bundle into the store."""

from __future__ import annotations

from pathlib import Path

import click

from kcoord.artifacts.signing import OFF, Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.options import IN_STORE, needed_store, print_json, subcommand
from kcoord.cli.output import echo
from kcoord.cli.transfer import bar
from kcoord.profiles import document
from kcoord.profiles.parts import roots, save_part
from kcoord.profiles.recipe import Recipe
from kcoord.profiles.requested import RequestedArtifact, requested_directory, save_requested
from kcoord.settings import Settings
from kcoord.transfer.bundle import Bundle, Imported
from kcoord.transfer.bundle_index import BundleInvalid


@subcommand("import", *IN_STORE)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Verify the file and print what would be done; write nothing.")
def command(settings: Settings, file: Path, dry_run: bool, as_json: bool) -> None:
    """Put the artifacts and profiles of FILE into the store.

    Every byte, and with KCOORD_TRUST=require the signature, is verified before anything is written. Artifacts that the store has
    are kept.
    """
    root, trust = needed_store(settings), Trust.of(settings)
    store = Store(root, trust)
    check_is_store(store.root, or_new=settings.store_create)
    with Bundle(file, trust) as bundle:
        with bar(f"verify {file.name}", quiet=as_json) as progress:
            bundle.verify(progress)
        profiles = {name: _decoded(file, name, text) for name, text in bundle.profiles()}
        if not dry_run:
            store.open()
        with bar(f"import {file.name}", quiet=as_json) as progress:
            done = bundle.publish(store, progress, dry_run=dry_run)
    if not dry_run:
        for name, (recipes, needs) in profiles.items():
            _save(store, name, recipes, needs, vouched=bundle.vouched)
    _print(done, sorted(profiles), store, dry_run, as_json)


def _decoded(file: Path, name: str, text: bytes) -> tuple[list[Recipe], list[RequestedArtifact]]:
    try:
        return document.decode(text)
    except ValueError as error:
        raise BundleInvalid(f"{file}: the profile {name}: {error}") from error


def _save(store: Store, name: str, recipes: list[Recipe], needs: list[RequestedArtifact], *, vouched: bool) -> None:
    """Without `vouched`, a signature by one of our keys, the import signs nothing; a signed part has another name, and stays."""
    if recipes:
        save_part(roots(store.root, store.root)[0] / name, recipes, trust=store.trust if vouched else OFF)
    if needs:
        save_requested(requested_directory(store.root, name), needs)


def _print(done: Imported, profiles: list[str], store: Store, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json({"published": done.published, "kept": done.kept, "profiles": profiles,
                    "dry_run": dry_run})  # fmt: skip
        return
    would = "would be published" if dry_run else "published"
    echo(f"{done.published} artifacts {would} and {done.kept} kept, {len(profiles)} profiles, in {store.root}")
