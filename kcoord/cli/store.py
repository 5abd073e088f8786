"""``kcoord store``: make the store."""

from __future__ import annotations

import click

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import MARKER
from kcoord.cli.options import IN_STORE, needed_store, print_json, subcommand
from kcoord.cli.output import echo
from kcoord.settings import Settings


@click.group("store")
def command() -> None:
    """Make the store."""


@subcommand("init", *IN_STORE)
def init(settings: Settings, as_json: bool) -> None:
    """Make a store in KCOORD_STORE (--store), once, before the first job. One that is there stays as it is.

    Agents make none: where a mount is missing, each node would have a store of its own.
    """
    root = needed_store(settings)
    is_new = not (root / MARKER).exists()
    uuid = Store(root, Trust.of(settings), lambda line, about=None: echo(f"kcoord: {line}", err=True)).open()
    if as_json:
        print_json({"store": str(root), "uuid": uuid, "new": is_new})
    else:
        echo(f"{root}: {'a new store' if is_new else 'there is a store already'} ({uuid[:8]})")


command.add_command(init)
