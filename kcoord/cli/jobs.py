"""The shared part of ``kcoord trace`` and ``kcoord report``: the list of jobs, the part of one, and the output file."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click
from rich.table import Table

from kcoord.cli.console import Console
from kcoord.cli.options import ON_DISK, print_json, printable, subcommand
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.report.timeline import Timeline, jobs, load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.spans import plain_text
from kcoord.units import several

STDOUT = Path("-")
_MOST_LISTED = 100  # jobs, in a table


def job_command(name: str, suffix: str, formats: str = "") -> Callable[[Callable[..., None]], click.Command]:
    """A subcommand about one job, whose function gets `timeline`, `path` (the output), `settings`, `as_json` and its own options.

    `suffix` is that of the default output. Without JOB the subcommand lists the jobs.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @subcommand(name, *ON_DISK)
        @click.argument("job", required=False)
        @click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path),
                      help=f"Where to write it. Default: kcoord-JOB{suffix}; '-' is stdout{formats}.")  # fmt: skip
        @click.option("--hours", metavar="N", type=click.FloatRange(min=0, min_open=True),
                      help="Only what began in the last N hours: for a name that several runs had.")  # fmt: skip
        @functools.wraps(function)
        def run(
            settings: Settings, job: str | None, output: Path | None, hours: float | None, as_json: bool, **own: Any
        ) -> None:
            if job is None:
                _list_jobs(settings, as_json)
                return
            if as_json and output == STDOUT:
                raise click.UsageError("--json and '-o -' both want stdout: give -o a file")
            since = 0.0 if hours is None else max(0.0, time.time() - hours * 3600)
            function(
                timeline=load_timeline(settings, job, since),
                path=_default_output(job, suffix) if output is None else output,
                settings=settings,
                as_json=as_json,
                **own,
            )

        return run

    return decorate


def _list_jobs(settings: Settings, as_json: bool) -> None:
    """Print the jobs that have left a time line, newest first. Raises `KcoordError`."""
    found = jobs(settings)
    if as_json:
        print_json([asdict(job) for job in found])
        return
    if not found:
        echo("no job has left a time line here yet")
        return
    table = Table("job", "last written (UTC)")
    for job in found[:_MOST_LISTED]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(job.updated))
        table.add_row(printable(job.job), when)
    console = Console()
    console.print(table)
    if len(found) > _MOST_LISTED:
        console.print(f"and {len(found) - _MOST_LISTED:,} older ones: --json lists all")


def scope_of(timeline: Timeline, settings: Settings) -> str:
    """The nodes whose spans `timeline` holds: those that share the store if it was read, else this node."""
    return several(len(timeline.nodes), "node") if settings.store and not timeline.problems else "this node only"


def _default_output(job: str, suffix: str) -> Path:
    return Path(re.sub(r"[^\w.-]", "_", f"kcoord-{job}", flags=re.ASCII)[:200] + suffix)


@contextmanager
def output_file(path: Path) -> Iterator[IO[str]]:
    """A text file at `path`; ``-`` is stdout. Raises `KcoordError`."""
    if path == STDOUT and sys.stdout is None:
        raise KcoordError("stdout is closed: name a file with -o")
    try:
        with click.open_file(str(path), "w", encoding="utf-8") as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        shown, why = plain_text(str(path), 1000), error.strerror or error
        raise KcoordError(f"{shown}: it cannot be written ({why}): name another file with -o") from error
