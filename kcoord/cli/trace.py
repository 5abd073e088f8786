"""``kcoord trace``: a job's time line for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

import click

from kcoord.cli.jobs import STDOUT, file_name, hours_flag, list_jobs, since, written
from kcoord.cli.options import ON_DISK, json_flag, print_json, settings_flags
from kcoord.report.trace import load_timeline, write_chrome
from kcoord.settings import Settings


@click.command("trace")
@click.argument("job", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write it. Default: kcoord-JOB.trace.json; '-' is stdout, *.gz is compressed.",
)
@hours_flag
@json_flag
@settings_flags(*ON_DISK)
def command(job: str | None, output: str | None, hours: float | None, as_json: bool, **flags: str | None) -> None:
    """Write the time line of JOB as a Chrome trace: a row for each rank, with its compiles, waits, fetches and loads of kernels.

    Open it in https://ui.perfetto.dev or chrome://tracing. Without JOB, list the jobs that have left a time line, newest first.
    """
    settings = Settings.from_environ(**flags)
    if job is None:
        list_jobs(settings, as_json)
        return
    if as_json and output == STDOUT:
        raise click.UsageError("--json and '-o -' both want stdout: give -o a file")
    timeline = load_timeline(settings, job, since(hours))
    for problem in timeline.problems:
        click.echo(f"kcoord: not read: {problem}", err=True)
    path = Path(output) if output else file_name(job, ".trace.json")
    with written(path) as file:
        spans = write_chrome(timeline, file.write)
    if output == STDOUT:
        return
    if as_json:
        facts = {"file": str(path), "job": job, "nodes": len(timeline.nodes), "ranks": timeline.ranks, "spans": spans}
        print_json({**facts, "dropped": timeline.dropped, "problems": timeline.problems})
        return
    of = f"{spans:,} span{'s' * (spans != 1)} of {timeline.ranks:,} rank{'s' * (timeline.ranks != 1)}"
    click.echo(f"{path}: {of}; open it in https://ui.perfetto.dev")
