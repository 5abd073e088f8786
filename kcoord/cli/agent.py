"""``kcoord agent``: the node's agent in the foreground, as a sidecar or a service runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress

import click

from kcoord.agent import spawn
from kcoord.agent.__main__ import run_agent
from kcoord.cli.options import ALL, ask_agent, no_agent, settings_flags
from kcoord.errors import AgentUnavailable
from kcoord.settings import FIELDS, Settings, variable


@click.command("agent")
@click.option("--stop", is_flag=True, help="Tell the running agent to finish its publishes and end.")
@settings_flags(*ALL)
def command(stop: bool, **flags: str | None) -> None:
    """Run this node's agent until SIGTERM; publishes finish first, leases are released."""
    settings = Settings.from_environ(**flags)
    if stop:
        if ask_agent(settings, {"op": "stop"}) is None:
            raise no_agent(settings)
        click.echo(f"the agent at {settings.socket_path} ends")
        return
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    from kcoord_launch.supervise import check_directories

    check_directories(settings)
    path = settings.socket_path
    try:
        with spawn.agent_lock(path, settings.agent_timeout):
            running = _is_running(settings)
            if running:
                raise AgentUnavailable(f"an agent listens at {path} already: 'kcoord agent --stop' ends it")
            listener = spawn.bind(path)
            identity = spawn.identity_of(path)
    except OSError as error:
        raise AgentUnavailable(f"cannot listen at {path}: {error}") from error
    click.echo(f"kcoord agent {os.getpid()} listens at {path}", err=True)
    for spec in FIELDS:  # what the flags say holds for everything in this process
        value = flags.get(spec.name)
        if value is not None:
            os.environ[variable(spec.name)] = value
    try:
        asyncio.run(run_agent(settings, listener))
    finally:
        with suppress(OSError), spawn.agent_lock(path, settings.agent_timeout):
            spawn.unlink_own(path, identity)
    sys.stderr.flush()
    os._exit(0)  # a thread that hangs in a dead NFS server must not hold us up


def _is_running(settings: Settings) -> bool:
    try:
        spawn.connect(settings.socket_path, settings.agent_timeout).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True
