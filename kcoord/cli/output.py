"""Lines of the command line. Control characters in names from a store and errors of a server do not reach the terminal."""

from __future__ import annotations

import click

from kcoord.telemetry.events import plain


def echo(line: str, *, err: bool = False) -> None:
    """`click.echo` without control characters."""
    click.echo(plain(line), err=err)
