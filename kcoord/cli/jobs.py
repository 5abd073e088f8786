"""What ``kcoord trace`` and ``kcoord report`` share: the list of jobs, which part of one, and the file that is written for it."""

from __future__ import annotations

import gzip
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kcoord.cli.options import Finite, print_json
from kcoord.errors import KcoordError
from kcoord.report.trace import jobs
from kcoord.settings import Settings
from kcoord.telemetry.spans import plain_text

STDOUT = "-"
_MOST_LISTED = 100  # jobs, in a table

hours_flag = click.option(
    "--hours",
    metavar="N",
    type=Finite(min=0, min_open=True),
    help="Only what began in the last N hours: for a name that several runs had.",
)


def since(hours: float | None) -> float:
    """Unix seconds of the time that was `hours` ago; 0 for None: ever."""
    return 0.0 if hours is None else max(0.0, time.time() - hours * 3600)


def list_jobs(settings: Settings, as_json: bool) -> None:
    """Print the jobs that have left a time line, newest first. Raises `KcoordError`."""
    found = jobs(settings)
    if as_json:
        print_json([asdict(job) for job in found])
        return
    if not found:
        click.echo("no job has left a time line here yet")
        return
    table = Table("job", "last written (UTC)", "files")
    for job in found[:_MOST_LISTED]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(job.updated))
        table.add_row(escape(plain_text(job.job)), when, str(job.files))
    console = Console()
    console.print(table)
    if len(found) > _MOST_LISTED:
        console.print(f"and {len(found) - _MOST_LISTED:,} older ones: --json lists all")


def file_name(job: str, ending: str) -> Path:
    """Where the output goes unless the user says: in the working directory."""
    return Path(re.sub(r"[^\w.-]", "_", f"kcoord-{job}", flags=re.ASCII)[:200] + ending)


@contextmanager
def written(path: Path) -> Iterator[IO[str]]:
    """A new text file that is at `path` once the block has ended well; compressed if it is .gz. Raises `KcoordError`.

    ``-`` is stdout, and what is no file, as a pipe, is written to as it is.
    """
    if str(path) == STDOUT:
        sys.stdout.flush()
        out = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", write_through=True)
        try:
            yield out
        finally:
            out.detach()
        return
    try:
        if path.is_dir():
            raise KcoordError(f"{_shown(path)}: it is a directory: name a file with -o")
        in_place = path.exists() and not path.is_file()
        fresh = path if in_place else path.with_name(f".kcoord-{os.getpid()}{path.suffix}")
        try:
            with (
                gzip.open(fresh, "wt", encoding="utf-8")
                if path.suffix == ".gz"
                else fresh.open("w", encoding="utf-8") as file
            ):
                yield file
            if not in_place:
                fresh.replace(path)
        finally:
            if not in_place:
                with suppress(OSError):
                    fresh.unlink()
    except OSError as error:
        why = error.strerror or error
        raise KcoordError(f"{_shown(path)}: it cannot be written ({why}): name another file with -o") from error


def _shown(path: Path) -> str:
    return plain_text(str(path), 1000)
