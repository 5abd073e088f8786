"""The ``kcoord`` command, one module a subcommand."""

from __future__ import annotations

import difflib
import errno
import io
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module

import click

import kcoord
from kcoord.cli.output import echo
from kcoord.errors import KcoordError, SettingsError
from kcoord.settings import FIELDS, unknown_variables, variable

_COMMANDS = (
    "agent", "cc", "doctor", "exec", "explain", "export", "gc", "import", "keys", "ls",
    "report", "stats", "status", "store", "toolchain", "trace", "verify", "warmup",
)  # fmt: skip
_MODULES = {"import": "import_bundle"}  # no module can have that name


class _Lazy(click.Group):
    """Imports only the subcommand that is called: ``kcoord exec`` does not load tables."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            near = difflib.get_close_matches(name, _COMMANDS)
            if not near or ctx.resilient_parsing:
                return None
            ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(near)}?")
        command: click.Command = import_module(f"kcoord.cli.{_MODULES.get(name, name)}").command
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has seen enough; click would exit with 1
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
            raise  # as process 1

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with the whole first sentence of its help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _sentence(self.get_command(ctx, name))) for name in _COMMANDS])


def _sentence(command: click.Command | None) -> str:
    text = " ".join((command.help if command is not None and command.help else "").split())
    return text.partition(". ")[0].removesuffix(".") + "."


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kcoord.__version__, prog_name="kcoord")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Compile each kernel of a distributed training job once, and share it with every rank, node and later job.

    Settings are environment variables (KCOORD_STORE, KCOORD_REDIS_URL, …); a flag of the same name wins.
    Exit codes: 0 done, 1 the thing failed, 2 a wrong setting or usage.
    """
    if ctx.invoked_subcommand != "agent":  # it tells them itself, in its log's format
        for line in unknown_variables():
            echo(f"kcoord: {line}", err=True)


def main() -> None:
    """The console script."""
    # of a container: it ignores signals that it does not handle, and its pod would wait for SIGKILL
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if isinstance(sys.stdout, io.TextIOWrapper):  # an arrow in a locale that has none is no error; so it is on stderr
        with suppress(OSError):  # a stream that wrote to a file cannot change once that is another
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = cli(prog_name="kcoord", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        echo(f"kcoord: {_refusal(error)}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(1)
    except KcoordError as error:
        echo(f"kcoord: {error}", err=True)
        sys.exit(2 if isinstance(error, SettingsError) else 1)
    except OSError as error:  # of a disk, where no command expected it
        if error.filename:
            echo(f"kcoord: {error.filename}: {error.strerror}: look at it, and at who this user is", err=True)
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # most likely of the file that stdout goes to
            echo(f"kcoord: {error.strerror}: look at where the output goes", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rest of it would fail once more as Python ends
        else:
            raise
        sys.exit(1)
    sys.exit(code)


def _refusal(error: click.ClickException) -> str:
    """Wrong usage in one line, where click writes four."""
    context, said = getattr(error, "ctx", None), error.format_message().rstrip(".")
    command = context.command_path if context is not None else "kcoord"
    if isinstance(error, click.NoSuchOption):
        flag = error.option_name
        if (name := variable(flag.lstrip("-").replace("-", "_"))) in map(variable, (spec.name for spec in FIELDS)):
            after = (
                ", or give it after the command's name" if context and isinstance(context.command, click.Group) else ""
            )
            said = f"{command} has no {flag}: set {name}{after}"
    return f"{said} ({command} --help)"
