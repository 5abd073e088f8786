"""``kcoord status``: who compiles what, for how long, and who waits."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from kcoord.cli.options import WHERE, agent_status, json_flag, no_agent, print_json, printable, settings_flags
from kcoord.settings import Settings

_REFRESH = 0.5  # seconds


@click.command("status")
@click.option("--once", is_flag=True, help="Print once instead of following, as is done without a terminal.")
@json_flag
@settings_flags(*WHERE)
def command(once: bool, as_json: bool, **flags: str | None) -> None:
    """Show the flights of this node's agent: a live table in a terminal, until Ctrl-C."""
    settings = Settings.from_environ(**flags)
    status = _status(settings)
    console = Console()
    if as_json:
        print_json(status)
    elif once or not console.is_terminal:
        console.print(_picture(status))
    else:
        with Live(_picture(status), console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_REFRESH)
                    live.update(_picture(_status(settings)), refresh=True)
            except KeyboardInterrupt:
                return


def _status(settings: Settings) -> dict[str, Any]:
    status = agent_status(settings)
    if status is None:
        raise no_agent(settings)
    return status


def _picture(status: dict[str, Any]) -> Group:
    head = (
        f"agent {status['agent']}: {status['clients']} clients, coordinated by {_coordinators(status)}, "
        f"up {max(0.0, time.time() - status['started']):.0f} s"
    )
    table = Table(expand=False)
    for column in ("kernel", "state", "who", "seconds", "waiting"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for flight in status["flights"]:
        waiting = flight["waiting"]
        shown = ", ".join(waiting[:4]) + (f" and {len(waiting) - 4} more" if len(waiting) > 4 else "")
        who, seconds = printable(flight["leader"]), f"{flight['seconds']:.1f}"
        table.add_row(printable(flight["name"]), flight["state"], who, seconds, printable(shown))
    lines: list[Any] = [head, table if status["flights"] else "nothing is being compiled"]
    return Group(*lines, *(printable(f"! {notice}") for notice in status["notices"]))


def _coordinators(status: dict[str, Any]) -> str:
    """Who coordinates, and which service that was to do so has failed, and how often."""
    failed = [
        f"{breaker['service']}: {'away' if breaker['state'] == 'open' else 'was away'}, {breaker['opened']}×"
        for breaker in status.get("breaker", ())
        if breaker["opened"]
    ]
    return printable(status["coordinates"] + (f" ({'; '.join(failed)})" if failed else ""))
