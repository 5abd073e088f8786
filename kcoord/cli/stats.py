"""``kcoord stats``: what a job asked for, compiled and saved."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from kcoord.cli.options import WHERE, json_flag, print_json, running_agent, settings_flags
from kcoord.settings import Settings
from kcoord.telemetry.counters import summary
from kcoord.telemetry.ledger import Ledger


@click.command("stats")
@click.option("--job", metavar="NAME", help="One job; default: every job that this node's agent knows.")
@json_flag
@settings_flags(*WHERE)
def command(job: str | None, as_json: bool, **flags: str | None) -> None:
    """Print the counters of a job, summed over its ranks; over its nodes too, where Redis is set."""
    settings = Settings.from_environ(**flags)
    with running_agent(settings) as client:
        reply = client.stats(job, quietly=True)
    if reply is None:  # the agent of a finished job has ended: its ledger has not
        reply = Ledger(settings.local_dir, "").total(job)
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
