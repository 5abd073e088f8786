"""``kcoord explain``: the factors of a key, and the differences between two keys."""

from __future__ import annotations

import click

from kcoord.artifacts.catalog import newest_first
from kcoord.artifacts.manifest import Manifest
from kcoord.cli.console import Console
from kcoord.cli.options import ON_DISK, print_json, printable, subcommand
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.keys.cache_key import Factor, FactorDiff
from kcoord.report.differences import factor_diffs, relative_of
from kcoord.report.edits import DIGITS, files_of, listed_factors
from kcoord.settings import Settings
from kcoord.units import several


@subcommand("explain", *ON_DISK)
@click.argument("key")
@click.argument("other", required=False)
@click.option(
    "--files", "only_files", is_flag=True, help="List the files in KEY, with the beginnings of their SHA-256."
)
def command(settings: Settings, key: str, other: str | None, only_files: bool, as_json: bool) -> None:
    """Print the factors in which two keys differ; for one KEY, its factors and how it differs from the most similar key of an
    earlier run. Of a file that differs, the first function, class or constant that was edited is named.

    A KEY is the start of a digest as 'kcoord ls' prints it, or a kernel's name if only one artifact has it.
    """
    if only_files and other:
        raise click.UsageError("--files is about one KEY")
    found = list(newest_first(settings))
    mine = _find(found, key)
    files = files_of(mine.key)
    if only_files and not as_json:
        for module, digest in files.items():
            echo(f"{module} {digest[:DIGITS]}")
        if not files:
            echo("kcoord: its key has no files: 'kcoord explain' without --files prints the factors", err=True)
        return
    theirs, same_run = (_find(found, other), None) if other else relative_of(found, mine)
    differences = factor_diffs(theirs, mine) if theirs else []
    factors = listed_factors(mine.explained)
    if as_json:
        print_json(
            {
                "key": mine.key.digest,
                "name": mine.key.name,
                "factors": {f.name: f.text for f in factors},
                "files": files,
                "compared_to": theirs.key.digest if theirs else None,
                "same_run": same_run,
                "differences": [{"factor": d.name, "from": d.ours, "to": d.theirs} for d in differences],
                "lines": [str(d) for d in differences],
            }
        )
        return
    console = Console(highlight=False, soft_wrap=True)  # whole lines can be searched for
    if not other:
        console.print(f"[bold]{printable(mine.key.name)}[/] ({printable(mine.key.backend)}) {mine.key.digest}")
        for factor in factors:
            if factor.name == "files" and files:
                console.print(f"  files: {several(len(files), 'file', 'files')}, which --files lists")
            else:
                _print(console, factor, "  ")
    if theirs is None:
        console.print("no other key of this kernel is known: nothing to compare it to")
        return
    which = " (of the same run)" if same_run else ""
    console.print(f"from {theirs.key.digest[:12]}{which} to {mine.key.digest[:12]}:")
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
