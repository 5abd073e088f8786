"""A script in the job: it is its user, and its agent tells it no secret. `tests/node/test_protocol.py` has its nonsense."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.command import KCOORD
from tests.support.sandbox import Sandbox
from tests.support.signing import OURS, A

_TELLS_ALL = """
import json, os, kcoord
coordinator = kcoord.connect()
key = kcoord.CacheKey.of("test", "k")
coordinator.get_or_compile(key, lambda staging: (staging / "kernel").write_text("code"))
print("compiled")
print(json.dumps([dict(os.environ), coordinator.status()]))
print(repr(coordinator.settings))
"""


@pytest.mark.parametrize("as_files", [False, True])
def test_a_script_finds_no_secret_in_its_environment_and_is_told_none_by_its_agent(
    sandbox: Sandbox, as_files: bool
) -> None:
    script = sandbox.root / "script.py"
    script.write_text(_TELLS_ALL)
    secrets = {"KCOORD_REDIS_URL": "redis://:hunter2@127.0.0.1:1/0", "KCOORD_SIGNING_KEY": OURS}
    if as_files:
        secrets = {f"{name}_FILE": str(private(sandbox.root / name, text)) for name, text in secrets.items()}
    command = [*KCOORD, "exec", "--", sys.executable, str(script)]
    done = sandbox.run_kcoord(*command, KCOORD_STORE=str(sandbox.root / "store"), KCOORD_JOB="job", **secrets)
    assert done.returncode == 0, done.stderr
    assert "compiled" in done.stdout
    assert "Redis cannot be used" in done.stderr, "the agent knows the URL"
    for secret in ("hunter2", A):
        assert secret not in done.stdout + done.stderr


def private(path: Path, text: str) -> Path:
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path
