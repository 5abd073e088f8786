"""``kcoord keys``: make, list and rotate the keys that sign the store's content."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
from rich.table import Table

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.signing_keys import Ed25519Key, Key, kind_of, new_key, parse_id, public_half, read_keys, text_of
from kcoord.cli.console import Console
from kcoord.cli.options import Parsed, json_flag, print_json
from kcoord.cli.output import echo
from kcoord.errors import KcoordError, SettingsError
from kcoord.files.atomic import staging_name
from kcoord.files.faults import store_errors
from kcoord.files.rename import sync_directory
from kcoord.settings import Settings, variable

_FILE = click.Path(dir_okay=False, path_type=Path)
_ID = Parsed("id", parse_id)
_ed25519 = click.option(
    "--ed25519", is_flag=True, help="A pair of keys, of which the public one verifies and cannot sign."
)
_id = click.option(
    "--id", "key_id", metavar="ID", type=_ID, help="The new key's id. Default: the date and random digits."
)


@click.group("keys")
def command() -> None:
    """Make, list and rotate the keys that sign the store's content.

    A file of keys is for KCOORD_SIGNING_KEY_FILE. With --ed25519 there are two: FILE signs, and FILE.pub verifies alone, for
    nodes that publish nothing.
    """


@command.command("new")
@click.argument("file", type=_FILE)
@_ed25519
@_id
def new(file: Path, ed25519: bool, key_id: str | None) -> None:
    """Write a new key to FILE, which only its owner may read. A file that exists is not replaced."""
    pair = [file, _verifiers(file)] if ed25519 else [file]
    for path in pair:
        if os.path.lexists(path):
            raise KcoordError(
                f"{path} is there: name another file, or add a key to it with 'kcoord keys rotate {path}'"
            )
    key_id = key_id or _new_id()
    key = new_key(ed25519=ed25519)
    for path, half in zip(pair, (key, public_half(key)), strict=False):
        _write(path, {key_id: half}, replaces=False)
    echo(f"{file}: the key {key_id} ({kind_of(key)}) signs and verifies: {variable('signing_key_file')}={file}")
    if ed25519:
        echo(f"{pair[1]}: its public half verifies alone: for every node that is not to sign")
    else:
        echo("every node that has it can sign: copy it to all of them, for this user alone (chmod 600)")


@command.command("list")
@click.argument("file", type=_FILE, required=False)
@json_flag
def show(file: Path | None, as_json: bool) -> None:
    """Print the keys of FILE, or of KCOORD_SIGNING_KEY_FILE: ids and kinds, and no secret."""
    keys = read_keys(_given(file))
    signer = Trust("require", keys).signer
    found = [{"id": key_id, "kind": kind_of(key), "signs": key_id == signer} for key_id, key in keys.items()]
    if as_json:
        print_json(found)
        return
    table = Table("id", "kind", "")
    for key_id, key in keys.items():
        table.add_row(key_id, kind_of(key), "signs and verifies" if key_id == signer else "verifies")
    Console().print(table)


@command.command("rotate")
@click.argument("file", type=_FILE, required=False)
@_id
def rotate(file: Path | None, key_id: str | None) -> None:
    """Put a new key first in FILE, or in KCOORD_SIGNING_KEY_FILE. It signs from then on; the earlier keys stay, and verify.

    The new key is of the kind of the one that signed. Of earlier Ed25519 keys the public half stays, and FILE.pub gets the new
    one. Print what to do next.
    """
    file = _given(file)
    if file.is_symlink():  # as a mounted Secret is
        raise KcoordError(f"{file} is a symbolic link: rotate the file that it is made from")
    keys = read_keys(file)
    signer = Trust("require", keys).signer
    if not signer:
        raise KcoordError(f"{file}: its keys only verify: rotate the file that signs")
    key_id = key_id or _new_id()
    if key_id in keys:
        raise KcoordError(f"{file} has a key {key_id!r}: give another --id")
    ed25519 = isinstance(keys[signer], Ed25519Key)
    key = new_key(ed25519=ed25519)
    if ed25519:  # first: a signer must not run ahead of those who verify
        verifiers = _verifiers(file)
        public = {key_id: key, **keys, **(read_keys(verifiers) if os.path.lexists(verifiers) else {})}
        _write(verifiers, {i: public_half(k) for i, k in public.items() if isinstance(k, Ed25519Key)}, replaces=True)
    _write(file, {key_id: key, **{i: public_half(k) for i, k in keys.items()}}, replaces=True)
    earlier = ", ".join(keys)
    echo(f"{file}: {key_id} ({kind_of(key)}) signs; {earlier} verify")
    if ed25519:
        echo(
            f"1. copy {verifiers} to the nodes that verify, then {file} to those that sign; agents read it within a minute"
        )
    else:
        echo(
            f"1. copy {file} to every node; agents read it within a minute, and leave alone what a key signed that they lack"
        )
    echo("2. move what is signed: kcoord export --all all.kcb, and with the new key alone kcoord import all.kcb")
    echo(f"3. remove {earlier} everywhere; if a key was stolen do this first, and begin with an empty store")


def _given(file: Path | None) -> Path:
    settings = Settings.from_environ()
    path = file or settings.signing_key_file
    if path is None:
        raise SettingsError("KCOORD_SIGNING_KEY_FILE is not set: set it, or name a FILE")
    return path


def _verifiers(file: Path) -> Path:
    return file.with_name(f"{file.name}.pub")


def _new_id() -> str:
    return f"key-{time.strftime('%Y%m%d')}-{os.urandom(4).hex()}"


def _write(path: Path, keys: dict[str, Key], *, replaces: bool) -> None:
    """Make `keys` the whole file at `path`, of mode 0600 from its first moment. Raises `KcoordError`."""
    fresh = path.with_name(f".{path.name}.{staging_name()}")
    with store_errors(path):
        try:
            with open(fresh, "x", opener=_private) as file:
                file.writelines(f"{key_id} {text_of(key)}\n" for key_id, key in keys.items())
                file.flush()
                os.fsync(file.fileno())
            if replaces:
                fresh.replace(path)
            else:
                os.link(fresh, path)  # fails if there is one by now
            sync_directory(path.parent)
        finally:
            fresh.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
