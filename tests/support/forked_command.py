"""``kcoord`` and ``kcoord-torchrun`` as in a directory of programs, forked: FORKS_AGENTS and FORKS_RANKS name the servers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.forkserver import ForkClient

COMMANDS = {
    "kcoord": ("FORKS_AGENTS", "-c", "from kcoord.cli import main; main()"),
    "kcoord-torchrun": ("FORKS_RANKS", "-m", "kcoord_launch.torchrun"),
}


def install(directory: Path) -> None:
    """Put them into `directory`."""
    directory.mkdir()
    for name in COMMANDS:
        command = directory / name
        command.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        command.chmod(0o755)


if __name__ == "__main__":
    server, *program = COMMANDS[Path(sys.argv[0]).name]
    client = ForkClient(os.environ[server], os.environ)
    sys.exit(client.start([*program, *sys.argv[1:]], os.environ, Path.cwd(), (0, 1, 2)).wait())
