"""``kcoord ls``: the artifacts of the store and of this node, each once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice

import click

from kcoord.artifacts.catalog import newest_first
from kcoord.artifacts.manifest import Manifest
from kcoord.cli.options import ON_DISK, print_json, short_key, subcommand
from kcoord.cli.output import echo
from kcoord.report.differences import distinguishing_factors
from kcoord.settings import Settings
from kcoord.telemetry.spans import plain_text
from kcoord.units import span_text

_WIDTHS = ("<12", "<8", "<40", "<14", ">12", ">9", ">6", "<24", "")
_COMPARED = 500  # artifacts that are read before they are printed, and told apart


@subcommand("ls", *ON_DISK)
@click.argument("name", required=False, default="")
def command(settings: Settings, name: str, as_json: bool) -> None:
    """List artifacts, newest first; with NAME those whose kernel's name contains it.

    The last column has the factors in which the keys of one kernel differ.
    """
    found = _distinguished(m for m in newest_first(settings) if name in m.key.name)
    if as_json:
        print_json([{**_document(manifest), "variant": variant} for manifest, variant in found])
    else:
        _print_table(found, settings)


def _distinguished(found: Iterator[Manifest]) -> Iterator[tuple[Manifest, str]]:
    """Each artifact with the factors that tell it from the `_COMPARED` read with it: a store may hold a hundred thousand."""
    while some := list(islice(found, _COMPARED)):
        variants = distinguishing_factors(some)
        yield from ((manifest, variants[manifest.key.digest]) for manifest in some)


def _print_table(found: Iterable[tuple[Manifest, str]], settings: Settings) -> None:
    echo(_row("key", "backend", "kernel", "device", "bytes", "compile s", "age", "compiled by", "variant"))
    count, size, seconds = 0, 0, 0.0
    for m, variant in found:
        rank = "" if m.origin.rank is None else f" rank {m.origin.rank}"
        what = short_key(m.key.digest), m.key.backend, m.key.name, m.origin.device
        age = span_text(time.time() - m.origin.created)
        echo(_row(*what, f"{m.size:,}", f"{m.compile_seconds:.2f}", age, f"{m.origin.host}{rank}", variant))
        count, size, seconds = count + 1, size + m.size, seconds + m.compile_seconds
    where = f"{settings.store_root} and {settings.local_dir}" if settings.store_root else f"{settings.local_dir}"
    echo(f"{count:,} artifacts, {size:,} bytes, {seconds:.1f} s of compiling, in {where}")


def _row(*cells: str) -> str:
    """Widths are fixed, since the first row is printed before the last is known; a longer cell pushes the others."""
    shown = [plain_text(cell) for cell in cells]
    return "  ".join(f"{cell:{spec}}" for cell, spec in zip(shown, _WIDTHS, strict=True)).rstrip()


def _document(manifest: Manifest) -> dict[str, object]:
    return {
        "digest": manifest.key.digest,
        "backend": manifest.key.backend,
        "name": manifest.key.name,
        "device": manifest.origin.device,
        "bytes": manifest.size,
        "files": [f.name for f in manifest.files],
        "compile_seconds": manifest.compile_seconds,
        "created": manifest.origin.created,
        "host": manifest.origin.host,
        "pid": manifest.origin.pid,
        "rank": manifest.origin.rank,
    }
