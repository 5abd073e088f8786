"""The ``kcoord`` command, as a user types it, in a sandbox."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.support.sandbox import Sandbox

KCOORD = ("-c", "from kcoord.cli import main; main()")


def kcoord(sandbox: Sandbox, *arguments: str, code: int = 0, **more: str | None) -> subprocess.CompletedProcess[str]:
    """Fails unless the command ends with `code`."""
    done = sandbox.run_kcoord(*KCOORD, *arguments, COLUMNS="200", **more)
    assert done.returncode == code, done.stderr
    return done


def as_json(sandbox: Sandbox, *arguments: str, code: int = 0, **more: str | None) -> Any:
    return json.loads(kcoord(sandbox, *arguments, "--json", code=code, **more).stdout)
