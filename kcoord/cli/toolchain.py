"""``kcoord toolchain``: the compilers that the store's artifacts were made with, for machines that have none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from kcoord.artifacts import toolchains
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.cli.options import IN_STORE, PROFILE, needed_store, print_json, printable, short_key, subcommand
from kcoord.cli.output import echo
from kcoord.files.faults import store_errors
from kcoord.keys.tools.record import ROLES, Toolchain, write_stubs
from kcoord.settings import Settings


@click.group("toolchain")
def command() -> None:
    """List the toolchains that the store's artifacts were made with, name one, and borrow it on machines without compilers.

    KCOORD_TOOLCHAIN=NAME lets a job on such a machine load what a machine with these compilers has published.
    """


@subcommand("ls", *IN_STORE)
def ls(settings: Settings, as_json: bool) -> None:
    """List the store's toolchains: compilers, releases, and how many artifacts were made with them."""
    store = _store(settings)
    found, names = toolchains.toolchains(store), toolchains.named(store)
    contents = {digest: set(map(toolchains.contents, each.tools.values())) for digest, each in found.items()}
    made: Counter[str] = Counter()
    for manifest in store.manifests():
        compilers = set(toolchains.compilers_in(manifest.key))
        made.update(digest for digest, of_it in contents.items() if compilers & of_it)
    rows: list[dict[str, Any]] = [
        {
            "digest": digest,
            "names": sorted(name for name, each in names.items() if each.key.digest == digest),
            "system": toolchain.system,
            "machine": toolchain.machine,
            "tools": toolchain.releases,
            "artifacts": made[digest],
        }
        for digest, toolchain in sorted(found.items())
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        releases = ", ".join(f"{name} {release}" for name, release in row["tools"].items())
        named = f"{', '.join(row['names'])}: " if row["names"] else ""
        echo(f"{short_key(row['digest'])}  {row['artifacts']:>6,} artifacts  {printable(named + releases)}")
    if not rows:
        echo("the store has no toolchains: a job records its compilers when it publishes what they made")


@subcommand("name", *IN_STORE)
@click.argument("digest")
@click.argument("name", type=PROFILE)
def name(settings: Settings, digest: str, name: str, as_json: bool) -> None:
    """Name the toolchain DIGEST, for KCOORD_TOOLCHAIN=NAME. A toolchain that had the name loses it."""
    if toolchains.DIGEST.fullmatch(name):
        raise click.UsageError("a name of hexadecimal digits alone would look like a digest")
    store = _store(settings)
    toolchain = toolchains.found(store, digest)
    toolchains.give_name(store, toolchain, name)
    if as_json:
        print_json({"digest": toolchain.key.digest, "name": name})
    else:
        echo(f"{name}: {short_key(toolchain.key.digest)}, {_text(toolchain)}")


@subcommand("install", *IN_STORE)
@click.argument("digest")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--role", "roles", multiple=True, type=click.Choice(list(ROLES)), help="Those that the image lacks. Default: all."
)
def install(settings: Settings, digest: str, directory: Path, roles: tuple[str, ...], as_json: bool) -> None:
    """Write stubs of the toolchain DIGEST, or of that name, into DIRECTORY of an image. Put it last on the image's PATH.

    An image that has clang needs no stub of gcc, which Triton would take first: --role leaves it out.
    """
    toolchain = toolchains.found(_store(settings), digest)
    with store_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        stubs = write_stubs(directory, toolchain, roles or ROLES)
    if as_json:
        print_json({"digest": toolchain.key.digest, "directory": str(directory), "stubs": stubs})
    else:
        echo(f"{directory}: {', '.join(stubs)}; put it last on PATH, in an image without these compilers")


def _text(toolchain: Toolchain) -> str:
    return printable(", ".join(f"{name} {release}" for name, release in toolchain.releases.items()))


def _store(settings: Settings) -> Store:
    root = needed_store(settings)
    check_is_store(root)
    return Store(root, Trust.of(settings))


for each in (ls, name, install):
    command.add_command(each)
