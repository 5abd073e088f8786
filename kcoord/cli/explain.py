"""``kcoord explain``: the factors of a key, and the differences between two keys."""

from __future__ import annotations

import click

from kcoord.artifacts.catalog import newest_first
from kcoord.artifacts.manifest import Manifest
from kcoord.cli.console import Console
from kcoord.cli.options import ON_DISK, print_json, printable, subcommand
from kcoord.errors import KcoordError
from kcoord.keys.cache_key import Factor, FactorDiff
from kcoord.report.differences import earlier, factor_diffs, nearest
from kcoord.settings import Settings


@subcommand("explain", *ON_DISK)
@click.argument("key")
@click.argument("other", required=False)
def command(settings: Settings, key: str, other: str | None, as_json: bool) -> None:
    """Print the factors in which two keys differ; for one KEY, its factors and how it differs from the most similar earlier key.

    A KEY is the start of a digest as 'kcoord ls' prints it, or a kernel's name if only one artifact has it.
    """
    found = list(newest_first(settings))
    mine = _find(found, key)
    theirs = _find(found, other) if other else nearest(earlier(found, mine), mine)
    differences = factor_diffs(theirs, mine) if theirs else []
    if as_json:
        print_json(
            {
                "key": mine.key.digest,
                "name": mine.key.name,
                "factors": {f.name: f.text for f in (*mine.key.factors, *mine.explained.details)},
                "compared_to": theirs.key.digest if theirs else None,
                "differences": [{"factor": d.name, "from": d.ours, "to": d.theirs} for d in differences],
            }
        )
        return
    console = Console(highlight=False, soft_wrap=True)  # whole lines can be searched for
    if not other:
        console.print(f"[bold]{printable(mine.key.name)}[/] ({printable(mine.key.backend)}) {mine.key.digest}")
        for factor in (*mine.key.factors, *mine.explained.details):
            _print(console, factor, "  ")
    if theirs is None:
        console.print("no other key of this kernel is known: nothing to compare it to")
        return
    console.print(f"from {theirs.key.digest[:12]} to {mine.key.digest[:12]}:")
    for difference in differences or [FactorDiff("nothing", "equal", "equal")]:
        console.print(f"  {printable(str(difference))}")


def _print(console: Console, factor: Factor, indent: str) -> None:
    console.print(f"{indent}{printable(factor.name)}" + ("" if factor.parts else f": {printable(factor.text)}"))
    for part in factor.parts:
        _print(console, part, indent + "  ")


def _find(found: list[Manifest], key: str) -> Manifest:
    matches = [m for m in found if m.key.digest.startswith(key)] or [m for m in found if m.key.name == key]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise KcoordError(f"no artifact has the key {key!r}: 'kcoord ls' lists them")
    keys = ", ".join(m.key.digest[:12] for m in matches[:8])
    raise KcoordError(f"{len(matches)} artifacts match {key!r}: name one of {keys}")
