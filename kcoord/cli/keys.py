"""``kcoord keys``: make and rotate the keys that sign the store's content."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from kcoord.artifacts.signing import Key, Trust, parse_id, read_keys
from kcoord.cli.options import Parsed
from kcoord.cli.output import echo
from kcoord.errors import KcoordError, SettingsError
from kcoord.files.atomic import staging_name
from kcoord.files.faults import store_errors
from kcoord.files.rename import sync_directory
from kcoord.settings import variable

_FILE = click.Path(dir_okay=False, path_type=Path)
_ID = Parsed("id", parse_id)
_id = click.option(
    "--id", "key_id", metavar="ID", type=_ID, help="The new key's id. Default: the date and random digits."
)


@click.group("keys")
def command() -> None:
    """Make and rotate the keys that sign the store's content.

    A file of keys is for KCOORD_SIGNING_KEY_FILE. FILE signs, and FILE.pub verifies alone, for nodes that publish nothing.
    'kcoord doctor' names the keys of a file, and the one that signs.
    """


@command.command("new")
@click.argument("file", type=_FILE)
@_id
def new(file: Path, key_id: str | None) -> None:
    """Write a new key to FILE and its public half to FILE.pub, which only their owner may read. No file is replaced."""
    for path in (file, _public(file)):
        if os.path.lexists(path):
            raise KcoordError(
                f"{path} is there: name another file, or add a key to it with 'kcoord keys rotate {file}'"
            )
    key_id, key = key_id or _new_id(), _new_key()
    _write(file, {key_id: key}, replaces=False)
    _write(_public(file), {key_id: key.public_half}, replaces=False)
    echo(f"{file}: the key {key_id} signs and verifies: {variable('signing_key_file')}={file}")
    echo("every node that has it can sign: copy it to those that publish, for this user alone (chmod 600)")
    echo(f"{_public(file)}: its public half verifies alone: for every node that is not to sign")


@command.command("rotate")
@click.argument("file", type=_FILE)
@_id
def rotate(file: Path, key_id: str | None) -> None:
    """Put a new key first in FILE. It signs from then on.

    Of earlier keys the public half stays, and verifies. FILE.pub gets the new public half. Print what to do next.
    """
    if file.is_symlink():  # as a mounted Secret is
        raise KcoordError(f"{file} is a symbolic link: rotate the file that it is made from")
    keys = read_keys(file, "")
    if not Trust("require", keys).signer:
        raise KcoordError(f"{file}: its keys only verify: rotate the file that signs")
    key_id = key_id or _new_id()
    if key_id in keys:
        raise KcoordError(f"{file} has a key {key_id!r}: give another --id")
    key, verifiers = _new_key(), _public(file)
    known = {**keys, **(read_keys(verifiers, "") if os.path.lexists(verifiers) else {})}
    # first the verifiers: a signer must not run ahead of those who verify
    _write(verifiers, {i: k.public_half for i, k in {key_id: key, **known}.items()}, replaces=True)
    _write(file, {key_id: key, **{i: k.public_half for i, k in keys.items()}}, replaces=True)
    earlier = ", ".join(keys)
    echo(f"{file}: {key_id} signs; {earlier} verify")
    echo(
        f"1. copy {verifiers} to the nodes that verify, then {file} to those that sign; agents read it within a minute"
    )
    echo("2. move what is signed: kcoord export --all all.kcb, and with the new key alone kcoord import all.kcb")
    echo(f"3. remove {earlier} everywhere; if a key was stolen do this first, and begin with an empty store")


def _public(file: Path) -> Path:
    return file.with_name(f"{file.name}.pub")


def _new_key() -> Key:
    try:
        return Key.of_seed(os.urandom(32))
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _new_id() -> str:
    return f"key-{time.strftime('%Y%m%d')}-{os.urandom(4).hex()}"


def _write(path: Path, keys: dict[str, Key], *, replaces: bool) -> None:
    """Make `keys` the whole file at `path`, of mode 0600 from its first moment. Raises `KcoordError`."""
    fresh = path.with_name(f".{path.name}.{staging_name()}")
    with store_errors(path.parent):
        try:
            with open(fresh, "x", opener=_private) as file:
                file.writelines(f"{key_id} {key.text}\n" for key_id, key in keys.items())
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
