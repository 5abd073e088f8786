"""``kcoord stats``: the figures of a job."""

from __future__ import annotations

from datetime import UTC, datetime

import click
from rich.table import Table

from kcoord.cli.console import Console
from kcoord.cli.jobs import scope_of
from kcoord.cli.options import WHERE, print_json, printable, running_agent, subcommand
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.report.timeline import Timeline, jobs, load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.figures import summary, troubles
from kcoord.telemetry.spans import directory_name, plain_text
from kcoord.units import first_few

_MOST_NAMED = 20


@subcommand("stats", *WHERE)
@click.option("--job", metavar="NAME", help="Default: the job that wrote last.")
def command(settings: Settings, job: str | None, as_json: bool) -> None:
    """Print the figures of a job.

    While this node's agent knows the job they are this node's. Afterwards they are those of all nodes that share the store.
    """
    if job == "":
        raise click.UsageError("--job '' names no job: leave it out for the latest")
    with running_agent(settings) as client:
        reply = client.stats(job, quietly=True)
    if reply is not None and reply["job"] is not None:
        job, scope, nodes, found = reply["job"], "this node", None, reply["figures"]
    else:
        timeline = _recorded(settings, job, or_none=as_json or job is None)
        job, nodes, found = timeline.job, timeline.nodes, timeline.figures
        scope = scope_of(timeline, settings)
    if as_json:
        print_json({**found, "job": job, "scope": scope, "nodes": nodes})
        return
    table = Table("figure", "value")
    for name, value in found.items():
        text = f"{value:.3f}" if isinstance(value, float) else str(len(value) if isinstance(value, list) else value)
        if name == "ready":
            text = f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC" if value else "-"
        table.add_row(name, text)
    console = Console()
    console.print(table)
    for line in (*troubles(found), f"job {job}, {scope}: {summary(found)}"):
        console.print(printable(line))


def _recorded(settings: Settings, job: str | None, *, or_none: bool) -> Timeline:
    """The time line of `job`, or of the latest one. If none is known: with `or_none` an empty one, and a line on stderr, else
    `KcoordError`.
    """
    known = jobs(settings)
    job = known[0].job if job is None and known else job
    if job is None or directory_name(job) not in {directory_name(seen.job) for seen in known}:
        names = first_few([plain_text(seen.job) for seen in known], _MOST_NAMED) or "none"
        about = "nothing is known here" + (f" of job {plain_text(job)!r}" if job else "")
        line = f"{about}; jobs of the last week: {names}"
        if not or_none:
            raise KcoordError(line)
        echo(f"kcoord: {line}", err=True)
        return Timeline(job or "")
    timeline = load_timeline(settings, job)
    for problem in timeline.problems:
        echo(f"kcoord: not read: {problem}", err=True)
    return timeline
