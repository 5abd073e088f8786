"""A number on the command line is one: "nan" and "inf", which Python takes for numbers, are refused in a line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click
import pytest

from kcoord.cli import _COMMANDS, _MODULES
from kcoord.cli.options import Finite
from kcoord.units import parse_bytes, parse_span
from tests.support.sandbox import Sandbox


def commands() -> Iterator[tuple[str, click.Command]]:
    for name in _COMMANDS:
        yield name, importlib.import_module(f"kcoord.cli.{_MODULES.get(name, name)}").command


def numbers() -> list[tuple[str, str]]:
    """Every option of every command that takes a number with a fraction, whatever its type is."""
    return [
        (name, option.opts[0])
        for name, command in commands()
        for option in command.params
        if isinstance(option.type, (click.FloatRange, click.types.FloatParamType))
    ]


def test_there_are_such_options() -> None:
    assert ("agent", "--await") in numbers()
    assert ("trace", "--hours") in numbers()


@pytest.mark.parametrize(("name", "option"), numbers())
@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "-inf", "1e400", "many"])
def test_what_is_no_number_is_refused(name: str, option: str, text: str) -> None:
    command = dict(commands())[name]
    with pytest.raises(click.BadParameter) as caught:
        command.make_context(name, [option, text])
    assert caught.value.exit_code == 2
    assert option in caught.value.format_message()
    assert len(caught.value.format_message().splitlines()) == 1


def test_a_whole_number_is_called_an_integer() -> None:
    with pytest.raises(click.BadParameter, match=r"'x' is not a valid integer\."):
        dict(commands())["gc"].make_context("gc", ["--max-files", "x"])


def test_a_number_is_taken_as_before() -> None:
    command = dict(commands())["agent"]
    assert command.make_context("agent", ["--await", "1.5", "--timeout", "0"]).params["within"] == 1.5
    assert Finite(min=0).convert("7", None, None) == 7.0


@pytest.mark.parametrize("text", ["nan", "inf", "nand", "1e400", "infs"])
def test_neither_is_a_size_or_a_time(text: str) -> None:
    for parse in (parse_bytes, parse_span):
        with pytest.raises(ValueError, match="it must be"):
            parse(text)


def test_a_user_sees_a_line_and_exit_code_2(sandbox: Sandbox) -> None:
    done = sandbox.run("-c", "import kcoord.cli; kcoord.cli.main()", "agent", "--await", "nan")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: Invalid value for '--await': nan is not a number")
