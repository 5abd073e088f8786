"""``kcoord agent``: the node's agent in the foreground, as a sidecar or a service runs it, and a pod's other containers."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import click

from kcoord.cli.options import ALL, environ_with, no_agent, running_agent, settings_flags
from kcoord.cli.output import echo
from kcoord.errors import AgentUnavailable, KcoordError, SettingsError, StoreError
from kcoord.ownership import make_directory
from kcoord.protocol import endpoint
from kcoord.protocol.endpoint import await_agent, why_silent
from kcoord.settings import Settings
from kcoord.telemetry.events import log_to_stderr

_CHECKED_WITHIN = 5.0  # seconds


@click.command("agent")
@click.option("--stop", is_flag=True, help="End the running agent, after its publishes.")
@click.option("--check", is_flag=True, help="For a probe: exit with 0 if the agent answers, else with 1.")
@click.option("--await", "within", type=click.IntRange(0, 3600), metavar="SECONDS",
              help="Wait until the agent answers, at most this long. Exits with 0 also if it does not.")  # fmt: skip
@click.option("--sidecar", is_flag=True, help="In a pod, whose ranks know no keys: under every policy KCOORD_LOCAL_DIR is the "
              "local directory itself. If the agent cannot serve, log why and stay; hide its secrets from other processes of "
              "this user.")  # fmt: skip
@settings_flags(*ALL)
def command(stop: bool, check: bool, within: int | None, sidecar: bool, **flags: str | None) -> None:
    """Run this node's agent until SIGTERM. It finishes its publishes and releases its leases first."""
    if stop + check + sidecar + (within is not None) > 1:
        raise click.UsageError("--stop, --check, --await and --sidecar are four commands: give one of them")
    if check or sidecar or within is not None:  # in a pod, beside the agent's secrets
        _hide_memory()
    if within is not None:
        _await(flags, within)
    elif sidecar:
        _serve_beside(flags)
    settings = Settings.from_environ(**flags)
    if check:
        if fault := why_silent(settings, _CHECKED_WITHIN):
            raise AgentUnavailable(fault)
    elif stop:
        with running_agent(settings) as client:
            if not client.stop(quietly=True):
                raise no_agent(settings)
        echo(f"the agent at {settings.socket_path} ends")
    else:
        _serve(settings, flags)


def _serve_beside(flags: dict[str, str | None]) -> None:
    """Never returns. An agent that ends at once, again and again, would keep the pod's other containers from starting."""
    _end_at_once_on(signal.SIGTERM)  # until the agent's loop handles it
    try:
        _serve(Settings.from_environ(**flags).shared_with_ranks, flags, opens_store=False)
    except (KcoordError, OSError) as error:
        _end_at_once_on(signal.SIGTERM, signal.SIGINT)  # the agent's loop, if it began, no longer handles them
        echo(f"kcoord: {error}; the job runs without an agent", err=True)
    while True:  # `sigwait` would miss a signal that another thread gets
        time.sleep(1.0)


def _await(flags: dict[str, str | None], within: int) -> None:
    try:
        fault = await_agent(Settings.from_environ(**flags), within)
    except SettingsError as error:
        fault = str(error)
    if fault:
        echo(f"kcoord: {fault}; the job starts without it", err=True)
    sys.exit(0)


def _end_at_once_on(*numbers: signal.Signals) -> None:
    """The first process of a container ignores signals that it does not handle, and its pod would wait for SIGKILL."""
    for number in numbers:
        signal.signal(number, lambda number, frame: os._exit(0))


def _serve(settings: Settings, flags: dict[str, str | None], *, opens_store: bool = True) -> None:
    """Never returns, but may raise. Without `opens_store` the agent opens the store later, and tries again if that fails."""
    import asyncio  # as the others, heavy: a probe needs none of them

    from kcoord.agent.__main__ import run_agent
    from kcoord.artifacts.signing import Trust
    from kcoord_launch.checks import check_directories

    log_to_stderr("%(asctime)s %(message)s")
    Trust.of(settings)  # a secret that cannot be used is an error before anything listens
    settings.redis_address()
    check_directories(settings, store=opens_store)
    path = settings.socket_path
    try:
        make_directory(path.parent, above=0o700)
        with endpoint.agent_lock(path, settings.agent_timeout):
            listener = endpoint.bind_unless_served(path, settings.agent_timeout)
            if listener is None:
                raise AgentUnavailable(f"an agent listens at {path} already: 'kcoord agent --stop' ends it")
            identity = endpoint.identity_of(path)
    except (OSError, StoreError) as error:
        raise AgentUnavailable(f"cannot listen at {path}: {error}") from error
    if settings.log_format == "text":
        echo(f"kcoord agent {os.getpid()} listens at {path}", err=True)
    environ = environ_with(flags)  # the flags hold for everything in this process
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    try:
        asyncio.run(run_agent(settings, listener))
    finally:
        endpoint.unlink_own(path, identity, settings.agent_timeout)
    sys.stderr.flush()
    os._exit(0)  # do not wait for a thread that hangs in a dead NFS server


def _hide_memory() -> None:
    """Make this process not dumpable, which closes ``/proc/<agent>/root`` and its environment to other processes of this user.

    With ``shareProcessNamespace`` the trainer, the same user, could read there the secrets that only this container mounts.
    Not guaranteed: the moment before this call.
    """
    import ctypes

    no_dumps = 4  # PR_SET_DUMPABLE
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(no_dumps, 0, 0, 0, 0)
