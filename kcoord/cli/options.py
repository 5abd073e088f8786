"""What the subcommands share: the settings as flags, ``--json``, and finding the agent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kcoord.errors import AgentUnavailable
from kcoord.protocol import endpoint
from kcoord.rank.client import AgentClient
from kcoord.rank.liveness import why_silent
from kcoord.settings import FIELDS, Settings, variable
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import plain_text

F = TypeVar("F", bound=Callable[..., Any])

_ANSWERS_WITHIN = 1.0  # seconds

ON_DISK = ("store", "local_dir", "namespace")
"""Of commands that ask no agent."""
WHERE = ("store", "local_dir", "redis_url", "redis_url_file", "socket", "namespace")
IN_STORE = ("store", "namespace", "trust", "signing_key_file")
"""Of commands that carry artifacts to and from the store."""
ALL = tuple(f.name for f in FIELDS if f.name not in ("disable", "spawn", "signing_key"))


def settings_flags(*names: str) -> Callable[[F], F]:
    """Add a flag for each named setting; the command gets them as keyword arguments."""

    def decorate(command: F) -> F:
        for spec in reversed(FIELDS):
            if spec.name in names:
                flag = f"--{spec.name.replace('_', '-')}"
                doc = f"{spec.metadata['doc']} [{variable(spec.name)}]"
                command = click.option(flag, spec.name, metavar=spec.metadata["unit"].upper(), help=doc)(command)
        return command

    return decorate


class Finite(click.FloatRange):
    """A number within a range, which `click.FloatRange` takes "nan" for, and with an open end "inf"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a number that can be counted to.", param, ctx)
        return number


json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def printable(text: str, most: int = 2000) -> str:
    """A stranger's text, for a terminal that knows rich's markup: nothing in it is a command."""
    from rich.markup import escape

    return str(escape(plain_text(text, most)))


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, sort_keys=True, default=str))


@contextmanager
def running_agent(settings: Settings) -> Iterator[AgentClient]:
    """A client of the agent, if one runs: it is never started for a question."""
    client = AgentClient(replace(settings, spawn=False), Notices())
    try:
        yield client
    finally:
        client.close()


def agent_status(settings: Settings) -> dict[str, Any] | None:
    """The agent's status; None if no agent runs."""
    with running_agent(settings) as client:
        return client.status(quietly=True)


def no_agent(settings: Settings) -> AgentUnavailable:
    """An error that says why the agent there does not answer, or, if there is none, which others there are: other settings make
    another agent.
    """
    try:
        endpoint.connect(settings.socket_path, _ANSWERS_WITHIN).close()
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    except OSError as error:
        return AgentUnavailable(f"no agent answers at {settings.socket_path}: {error}")
    else:
        if why := why_silent(settings, _ANSWERS_WITHIN):
            return AgentUnavailable(why)
    others: list[Path] = []
    with suppress(OSError):  # a directory that this user may not read has none for this user
        others = sorted(p for p in settings.local_dir.glob("agent-*.sock") if p != settings.socket_path)
    hint = f"; other settings have one: --socket {others[0]}" if others else "; a job or 'kcoord agent' starts one"
    return AgentUnavailable(f"no agent listens at {settings.socket_path}{hint}")
