"""A writer of the store, or of Redis, who puts control characters into names and errors: no terminal, and no log, gets them."""

from __future__ import annotations

import io
import os
import pty
import shutil
from pathlib import Path

import pytest
from rich.table import Table

from kcoord.cli.console import Console
from kcoord.packs.recipe_files import save_part
from kcoord.telemetry.events import Notices
from kcoord.telemetry.progress import Look, line_of
from kcoord_launch.console import say
from tests.support.artifacts import publish
from tests.support.command import KCOORD
from tests.support.profiles import recipe
from tests.support.sandbox import Sandbox
from tests.support.signing import opened

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x7f\u202e"
LOGS = """
import logging, sys
from kcoord.telemetry.events import Notices, log_to_stderr, tell_bug
log_to_stderr("%(message)s")
Notices().tell(sys.argv[1])
tell_bug(RuntimeError(sys.argv[1]), sys.argv[1])
"""


def obeyed(text: str) -> set[str]:
    """The characters of `text` that a terminal would obey, but for line ends."""
    return {c for c in text if not c.isprintable()} - {"\n"}


@pytest.fixture
def store(sandbox: Sandbox) -> Path:
    """One that has such names."""
    root = sandbox.root / "store"
    store = opened(root, policy="off")
    home = store.home(publish(store, f"kernel{EVIL}"))
    shutil.copy(home, home.with_name(f"{home.name[:-1]}{'1' if home.name[-1] == '0' else '0'}"))
    shutil.copy(home, home.with_name(f"{home.name[:20]}{EVIL}"))
    store.home(publish(store, f"torn{EVIL}")).write_bytes(b"torn")
    (root / "v2" / "objects" / f"zz{EVIL}").mkdir()
    save_part(root / "v2" / "profiles" / "good", [recipe(1)])
    save_part(root / "v2" / "profiles" / f"bad{EVIL}", [recipe(1)])
    for name in ("good", f"bad{EVIL}"):
        (root / "v2" / "profiles" / name / f"x{EVIL}.recipes").write_bytes(b"torn")
    (root / "v2" / "packs" / f"bad{EVIL}").mkdir(parents=True)
    (root / "v2" / "packs" / f"bad{EVIL}" / f"{'0' * 64}.pack").write_bytes(b"torn")
    return root


COMMANDS = [
    "ls", "verify", "explain kernel", "stats", "status", "gc --dry-run", "gc --dry-run --max-gib 0",
    "export --all out.kcb", "warmup good", "report", "trace",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_hands_a_terminal_what_it_would_obey(sandbox: Sandbox, store: Path, command: str) -> None:
    done = sandbox.run_kcoord(*KCOORD, *command.split(), KCOORD_STORE=str(store))
    assert obeyed(done.stdout + done.stderr) == set(), done.stdout + done.stderr


def test_a_name_in_a_table_of_a_terminal_has_no_control_characters() -> None:
    reads, writes = pty.openpty()
    with os.fdopen(writes, "w") as terminal:
        table = Table("name")
        table.add_row(f"one{EVIL}", style="bold")
        Console(file=terminal, force_terminal=True, width=80).print(table)
    shown = os.read(reads, 1 << 16).decode()
    os.close(reads)
    assert "\x1b[1m" in shown, "its own are there"
    assert "\x1b]0;" not in shown
    assert "\x1b[2J" not in shown
    assert obeyed(shown) == {"\x1b", "\r"}, "a terminal's line ends have both"


def test_notices_progress_and_logs_have_no_control_characters(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    notices = Notices()
    notices.tell(f"cannot use Redis: {EVIL}")
    say(f"no {EVIL}")
    said = [*notices.since(0)[0], capsys.readouterr().err, line_of("good", Look(1, 1, (EVIL,)), [1.0], 1)]
    logged = sandbox.run_kcoord("-c", LOGS, EVIL)
    assert "Traceback" not in logged.stderr or logged.returncode == 0, logged.stderr
    assert [obeyed(text) for text in (*said, logged.stderr)] == [set()] * 4
    assert logged.stderr.count("owned") == 3


def test_lines_and_tabs_stay(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\n\ttwo")
    assert capsys.readouterr().err == "kcoord: one\n\ttwo\n"
    stream = io.StringIO()
    Console(file=stream, width=40).print("one\ntwo …")
    assert stream.getvalue() == "one\ntwo …\n"
