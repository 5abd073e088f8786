"""``kcoord ls``: the artifacts of the store, or of the local tier where there is no store."""

from __future__ import annotations

import time

import click
from rich.console import Console
from rich.table import Table

from kcoord.artifacts.catalog import artifacts_of
from kcoord.artifacts.manifest import Manifest
from kcoord.cli.options import WHERE, json_flag, print_json, printable, settings_flags
from kcoord.settings import Settings


@click.command("ls")
@click.argument("name", required=False, default="")
@json_flag
@settings_flags(*WHERE)
def command(name: str, as_json: bool, **flags: str | None) -> None:
    """List artifacts, newest first; with NAME those whose kernel name contains it."""
    settings = Settings.from_environ(**flags)
    found = [m for m in artifacts_of(settings) if name in m.key.name]
    found.sort(key=lambda m: -m.origin.created)
    if as_json:
        print_json([_document(m) for m in found])
        return
    table = Table()
    for column in ("key", "backend", "kernel", "device", "bytes", "compile s", "age", "compiled by"):
        right = column in ("bytes", "compile s", "age")
        table.add_column(column, justify="right" if right else "left", no_wrap=column == "key")
    for m in found:
        rank = "" if m.origin.rank is None else f" rank {m.origin.rank}"
        what = (
            m.key.digest[:12],
            m.key.backend,
            m.key.name,
            m.origin.device,
            f"{m.size:,}",
            f"{m.compile_seconds:.2f}",
        )
        table.add_row(*map(printable, what), _age(m.origin.created), printable(f"{m.origin.host}{rank}"))
    console = Console()
    console.print(table)
    console.print(
        f"{len(found)} artifacts, {sum(m.size for m in found):,} bytes, "
        f"{sum(m.compile_seconds for m in found):.1f} s of compiling, in {settings.store or settings.local_dir}"
    )


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


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
