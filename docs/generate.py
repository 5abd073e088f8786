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
    lines = ["| variable | unit | default | meaning |", "| --- | --- | --- | --- |"]
    for spec in FIELDS:
        default = "" if spec.name in _BY_ENVIRONMENT else _shown(getattr(defaults, spec.name))
        lines.append(f"| `{variable(spec.name)}` | {spec.metadata['unit']} | {default} | {spec.metadata['doc']} |")
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
    parts = [
        _NOTE + "# Commands\n\n"
        "Exit codes: 0 done, 1 the thing failed, 2 a wrong setting or usage. Commands that print facts take `--json`.\n"
        "The [settings](settings.md) that a command uses are flags, too: `--store` for `KCOORD_STORE`. `kcoord COMMAND --help`\n"
        "says more.\n"
    ]
    context = click.Context(cli, info_name="kcoord")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        parts.append(_command(command, click.Context(command, info_name=name, parent=context)))
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context, heading: str = "##") -> str:
    options = [p for p in command.params if isinstance(p, click.Option)]
    own = [o for o in options if not _is_setting(o) and not o.hidden and o.name != "as_json"]
    text = [f"{heading} {context.command_path}\n"]
    arguments = command.get_usage(context).partition("[OPTIONS] ")[2]
    if arguments and not isinstance(command, click.Group):
        text.append(f"`{context.command_path} {arguments}`\n")
    text.append(_prose(inspect.cleandoc(command.help or "").partition("\n\n")[0]) + "\n")
    if own:
        text.extend(f"- {_option(option, context)}: {_cell(option.help or '')}" for option in own)
        text.append("")
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            text.append(_command(each, click.Context(each, info_name=name, parent=context), heading + "#"))
    return "\n".join(text)


def _is_setting(option: click.Option) -> bool:
    """True for a setting's flag. `kcoord stats --job` is none, though a setting has this name."""
    return option.name in _SETTINGS and variable(option.name) in (option.help or "")


def _option(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.is_flag or option.count:
        return names
    return f"{names} `{option.metavar or option.type.name.upper()}`"


def _prose(text: str) -> str:
    """A docstring without click's formatting marks, and safe in Markdown."""
    return (
        inspect.cleandoc(text)
        .replace("\b\n", "")
        .replace("\b", "")
        .replace("``", "`")
        .strip()
        .replace("<", "&lt;")
        .replace("*", "\\*")
    )


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
