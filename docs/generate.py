"""``python docs/generate.py``: write settings.md and cli.md from the code, and the picture from results. A test compares them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click
import first_step

from kcoord.cli import cli
from kcoord.settings import FIELDS, Settings, variable

_BY_ENVIRONMENT = ("local_dir",)  # their text has the default
_NOTE = "<!-- Written by docs/generate.py: change the code, and run it. -->\n\n"
_SETTINGS = {spec.name for spec in FIELDS}


def settings_table() -> list[str]:
    """The table of settings, from `FIELDS`."""
    defaults = Settings()
    lines = ["| variable | value (default) | meaning |", "| --- | --- | --- |"]
    for spec in FIELDS:
        default = "" if spec.name in _BY_ENVIRONMENT else _shown(getattr(defaults, spec.name))
        value = f"{spec.metadata['unit']} ({default})" if default else spec.metadata["unit"]
        lines.append(f"| `{variable(spec.name)}` | {value} | {spec.metadata['doc']} |")
    return lines


def settings_page() -> str:
    intro = (
        "# Settings\n\n"
        "A setting is an environment variable, and most are flags, too: `--store` of `kcoord` and `--kcoord-store` of\n"
        "`kcoord-torchrun` set `KCOORD_STORE`. A flag wins. An empty variable counts as unset, except `KCOORD_NAMESPACE`.\n"
        "A bad value ends the command before the job starts: one line with the remedy, and exit code 2.\n\n"
    )
    outro = (
        "\nSet the same values on all nodes. Processes of a node share an agent if they have the same user, store, local\n"
        "directory, Redis and namespace.\n"
    )
    return _NOTE + intro + "\n".join(settings_table()) + "\n" + outro


def cli_page() -> str:
    intro = (
        "# Commands\n\n"
        "`kcoord COMMAND --help` explains the options, and lists the [settings](settings.md) that are flags, too: `--store` for\n"
        "`KCOORD_STORE`. Commands that print facts take `--json`. Exit codes: 0 done, 1 the thing failed, 2 a wrong setting or\n"
        "usage.\n\n"
    )
    context = click.Context(cli, info_name="kcoord")
    rows = [row for name in cli.list_commands(context) for row in _rows(cli.get_command(context, name), name, context)]
    return _NOTE + intro + "\n".join(["| command | what it does | options |", "| --- | --- | --- |", *rows, ""])


def _rows(command: click.Command | None, name: str, parent: click.Context) -> list[str]:
    """The row of a command, or those of a group's commands."""
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent)
    if isinstance(command, click.Group):
        return [row for each, inner in command.commands.items() for row in _rows(inner, each, context)]
    options = [p for p in command.params if isinstance(p, click.Option)]
    own = [o for o in options if not _is_setting(o) and not o.hidden and o.name != "as_json"]
    usage = f"{context.command_path} {command.get_usage(context).partition('[OPTIONS] ')[2]}".strip()
    first = _prose(inspect.cleandoc(command.help or "").partition("\n\n")[0])
    return [f"| `{usage}` | {_cell(first)} | {', '.join(f'`{o.opts[-1]}`' for o in own)} |"]


def _is_setting(option: click.Option) -> bool:
    """True for a setting's flag. `kcoord stats --job` is none, though a setting has this name."""
    return option.name in _SETTINGS and variable(option.name) in (option.help or "")


def _prose(text: str) -> str:
    """A docstring without click's formatting marks, and safe in Markdown."""
    return inspect.cleandoc(text).replace("\b\n", "").replace("\b", "").replace("``", "`").strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, (bool, float)) and value == int(value) else str(value)


def main() -> None:
    here = Path(__file__).parent
    (here / "settings.md").write_text(settings_page())
    (here / "cli.md").write_text(cli_page())
    (here / "first-step.svg").write_text(first_step.drawn())


if __name__ == "__main__":
    main()
