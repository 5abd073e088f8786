"""``kcoord status``: the flights of this node's agent, with their leaders and waiters."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.table import Table

from kcoord.cli.console import Console
from kcoord.cli.options import WHERE, agent_status, no_agent, print_json, printable, short_key, subcommand
from kcoord.settings import Settings
from kcoord.telemetry.figures import asides
from kcoord.units import first_few


@subcommand("status", *WHERE)
def command(settings: Settings, as_json: bool) -> None:
    """Show the compiles under way on this node, and the ranks that wait for them. To follow them: watch kcoord status."""
    status = agent_status(settings)
    if status is None:
        raise no_agent(settings)
    if as_json:
        print_json(status)
    else:
        Console().print(_picture(status))


def _picture(status: dict[str, Any]) -> Group:
    head = (
        f"agent {status['agent']}: {status['clients']} clients, coordinated by {_coordinators(status)}, "
        f"up {max(0.0, time.time() - status['started']):.0f} s"
    )
    table = Table(expand=False)
    for column in ("key", "kernel", "state", "who", "seconds", "waiting"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for flight in status["flights"]:
        leader, waiting = printable(flight["leader"]), printable(first_few(flight["waiting"], 4))
        key, kernel = short_key(flight["key"]), printable(flight["name"])
        table.add_row(key, kernel, flight["state"], leader, f"{flight['seconds']:.1f}", waiting)
    lines: list[Any] = [
        head,
        *([f"page: http://{status['page']}/"] if status.get("page") else []),
        table if status["flights"] else "nothing is being compiled",
    ]
    lines += [
        printable(f"pack of {profile}: {pack['artifacts']} artifacts")
        for profile, pack in status.get("packs", {}).items()
    ]
    lines += [
        printable(_pool_line(job, pool))
        for job, pool in status.get("pools", {}).items()
        if pool["running"] or pool["compiled"]
    ]
    for job, found in status.get("jobs", {}).items():
        lines += [printable(f"! {job}: {line}") for line in asides(found)]
    return Group(*lines, *(printable(f"! {notice}") for notice in status["notices"]))


def _pool_line(job: str, pool: dict[str, Any]) -> str:
    line = (
        f"pool of {job}: {len(pool['busy'])} cores busy, {pool['queued']} keys to compile, {pool['compiled']} compiled ahead, "
        f"{pool['used']} of them used"
    )
    line += f", {pool['guessed']} of the keys guessed" if pool["guessed"] else ""
    return line + (f", {pool['failed']} failed (the last: {pool['failures'][-1]})" if pool["failures"] else "")


def _coordinators(status: dict[str, Any]) -> str:
    """The lease service that coordinates, and those that failed, with the number of failures."""
    failed = [
        f"{breaker['service']}: {'away' if breaker['state'] == 'open' else 'was away'}, {breaker['opened']}×"
        for breaker in status.get("breaker", ())
        if breaker["opened"]
    ]
    return printable(status["coordinates"] + (f" ({'; '.join(failed)})" if failed else ""))
