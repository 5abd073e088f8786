"""What ``kcoord trace`` and ``kcoord report`` share: the list of jobs, and the file that is written for one."""

from __future__ import annotations

import gzip
import os
import re
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

from kcoord.cli.options import print_json
from kcoord.errors import KcoordError
from kcoord.settings import Settings
from kcoord.telemetry.trace import jobs


def list_jobs(settings: Settings, as_json: bool) -> None:
    """Print the jobs that have left a time line, newest first. Raises `KcoordError`."""
    found = jobs(settings)
    if as_json:
        print_json([asdict(job) for job in found])
        return
    if not found:
        click.echo("no job has left a time line here yet")
        return
    table = Table("job", "last written (UTC)", "agents")
    for job in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(job.updated))
        table.add_row(escape(job.job), when, str(job.files))
    Console().print(table)


def file_name(job: str, ending: str) -> Path:
    """Where the output goes unless the user says: in the working directory."""
    return Path(re.sub(r"[^\w.-]", "_", f"kcoord-{job}")[:200] + ending)


@contextmanager
def written(path: Path) -> Iterator[IO[str]]:
    """A new text file that is at `path` once the block has ended well; compressed if it is .gz. Raises `KcoordError`."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with (
            gzip.open(fresh, "wt", encoding="utf-8")
            if path.suffix == ".gz"
            else fresh.open("w", encoding="utf-8") as file
        ):
            yield file
        fresh.replace(path)
    except OSError as error:
        raise KcoordError(f"{path}: it cannot be written ({error.strerror}): name another file with -o") from error
    finally:
        with suppress(OSError):
            fresh.unlink()
