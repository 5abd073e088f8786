"""The ``kcoord`` command, as a user types it, in a sandbox."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.support.sandbox import Sandbox

KCOORD = ("-c", "from kcoord.cli import main; main()")
DOCTOR = ("-c", f"import kcoord.cli.doctor as doctor; doctor._examined = lambda usable: (); {KCOORD[1]}", "doctor")
"""``kcoord doctor``, but for one check: it imports and tries all compilers, which takes half a minute."""


def kcoord(sandbox: Sandbox, *arguments: str, code: int = 0, **more: str | None) -> subprocess.CompletedProcess[str]:
    """Fails unless the command ends with `code`."""
    done = sandbox.run_kcoord(*KCOORD, *arguments, COLUMNS="200", **more)
    assert done.returncode == code, done.stderr
    return done


def as_json(sandbox: Sandbox, *arguments: str, code: int = 0, **more: str | None) -> Any:
    return json.loads(kcoord(sandbox, *arguments, "--json", code=code, **more).stdout)


def findings(sandbox: Sandbox, *, code: int = 0, **more: str | None) -> list[dict[str, str]]:
    """Those of `DOCTOR`, which ends with `code`."""
    done = sandbox.run_kcoord(*DOCTOR, "--json", **more)
    assert done.returncode == code, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return found
