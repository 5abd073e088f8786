"""``kcoord stats``: the counters of a job."""

from __future__ import annotations

import click
from rich.table import Table

from kcoord.cli.console import Console
from kcoord.cli.options import WHERE, print_json, running_agent, subcommand
from kcoord.cli.output import echo
from kcoord.report.tables import first_few
from kcoord.settings import Settings
from kcoord.telemetry.counters import summary
from kcoord.telemetry.ledger import Ledger
from kcoord.telemetry.spans import plain_text

_MOST_NAMED = 20


@subcommand("stats", *WHERE)
@click.option("--job", metavar="NAME", help="One job; default: every job that this node's agent knows.")
def command(settings: Settings, job: str | None, as_json: bool) -> None:
    """Print the counters of a job, summed over its ranks, and with Redis over its nodes."""
    if job == "":
        raise click.UsageError("--job '' names no job: leave it out for all jobs")
    with running_agent(settings) as client:
        reply = client.stats(job, quietly=True)
    ledger = Ledger(settings.local_dir, "")
    if reply is None:  # the agent of a finished job has ended; its ledger stays
        reply = ledger.total(job)
    if job and not reply["agents"]:  # no error: it may be a job's that asked for nothing
        known = first_few([plain_text(name) for name in ledger.jobs()], _MOST_NAMED) or "none"
        echo(f"kcoord: nothing is known here of job {plain_text(job)!r}; jobs of the last week: {known}", err=True)
    counters = reply["counters"]
    if as_json:
        print_json({**counters, "jobs": reply["jobs"], "agents": reply["agents"]})
        return
    table = Table("counter", "value")
    for name, value in counters.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(table)
    console.print(f"{len(reply['jobs'])} jobs, {reply['agents']} agents: {summary(counters)}")
