"""The parts that subcommands share: settings as flags, ``--json``, types of options, and questions to the agent."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kcoord.cli.output import echo
from kcoord.errors import AgentUnavailable, SettingsError
from kcoord.protocol.endpoint import why_silent
from kcoord.rank.client import AgentClient
from kcoord.settings import ALTERNATIVES, FIELDS, Settings, profile_name, variable
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import plain_text

F = TypeVar("F", bound=Callable[..., Any])

_ANSWERS_WITHIN = 1.0  # seconds
_LONGEST_PRINTED = 2000  # characters

ON_DISK = ("store", "local_dir", "namespace")
"""Of commands that ask no agent."""
WHERE = ("store", "local_dir", "redis_url", "redis_url_file", "socket", "namespace")
IN_STORE = ("store", "namespace", "trust", "signing_key_file")
"""Of commands that carry artifacts to and from the store."""
ALL = tuple(f.name for f in FIELDS if f.name not in ("disable", "spawn", "signing_key"))

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


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


def subcommand(name: str, *settings: str) -> Callable[[Callable[..., None]], click.Command]:
    """A subcommand with ``--json`` and the flags of the named settings.

    Its function gets `settings`, parsed, `as_json`, and its own options.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        own = vars(function).pop("__click_params__", [])

        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in settings}
            function(settings=Settings.from_environ(**flags), **arguments)

        command = json_flag(settings_flags(*settings)(run))
        vars(command)["__click_params__"] += own
        return click.command(name)(command)

    return decorate


def environ_with(flags: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the settings that are given as flags. A secret's flag removes its alternative variable."""
    environ = dict(os.environ)
    for name, value in flags.items():
        if value is not None:
            environ[variable(name)] = value
            if (other := ALTERNATIVES.get(name)) is not None:
                environ.pop(variable(other), None)
    return environ


class Parsed(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """An option's type: `parse` converts the text, or raises ValueError with the remedy."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{value!r:.80}: {error}", param, ctx)


def short_key(digest: str) -> str:
    """For people: enough of a digest to tell a kernel's variants apart. `kcoord explain` takes it."""
    return printable(digest)[:12]


PROFILE = Parsed("name", profile_name)


def needed_store(settings: Settings, hint: str = "") -> Path:
    """The root of the store. Raises `SettingsError` if none is set."""
    if settings.store_root is None:
        raise SettingsError(f"KCOORD_STORE is not set: set it, or give --store{hint}")
    return settings.store_root


def printable(text: str) -> str:
    """Untrusted text for a terminal: no control characters, and no markup of rich's."""
    from rich.markup import escape

    return str(escape(plain_text(text, _LONGEST_PRINTED)))


def print_json(document: Any) -> None:
    echo(json.dumps(document, indent=2, sort_keys=True, default=str))


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
    """An error that says why the agent does not answer. If there is none it names an agent of other settings."""
    path = settings.socket_path
    why = why_silent(settings, _ANSWERS_WITHIN) or f"the agent at {path} did not answer in time"
    if os.path.lexists(path):
        return AgentUnavailable(why)
    if path.parent.exists() and not os.access(path.parent, os.X_OK):
        return AgentUnavailable(f"{why}; the directory is another user's: set KCOORD_LOCAL_DIR to the one of your jobs")
    others = sorted(path.parent.glob("agent-*.sock"))
    hint = f"other settings have one: --socket {others[0]}" if others else "a job or 'kcoord agent' starts one"
    return AgentUnavailable(f"{why}; {hint}")
