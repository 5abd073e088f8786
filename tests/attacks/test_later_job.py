"""A later job of the same user: the agent of an earlier one, with less trust, does not serve it."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox, eventually
from tests.support.signing import OURS, THEIRS

RANK = PROGRAMS / "generic_rank.py"
SIGNED = {"KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "require"}


def counters(sandbox: Sandbox, *command: str | Path, **settings: str | None) -> tuple[Counter[str], str]:
    """A rank's counters of one kernel, and what it told."""
    done = sandbox.run(*(command or (RANK, "1", "0")), KCOORD_STORE=str(sandbox.root / "store"), **settings)
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout.splitlines()[-1])["counters"]), done.stderr


def earlier_job(sandbox: Sandbox, **settings: str) -> None:
    """Its agent goes on; what it compiled is in the store, and no more on this node."""
    counters(sandbox, **settings)
    assert sandbox.processes()
    eventually(lambda: list((sandbox.root / "store" / "v1" / "objects").glob("*/*/manifest.msgpack")))
    shutil.rmtree(sandbox.local / "objects")


@pytest.mark.parametrize(
    "earlier", [{}, {"KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "warn"}, {"KCOORD_SIGNING_KEY": THEIRS}]
)
def test_a_job_that_requires_signatures_is_not_served_by_an_agent_that_does_not(
    sandbox: Sandbox, earlier: dict[str, str]
) -> None:
    earlier_job(sandbox, **earlier)
    unsigned = next((sandbox.root / "store" / "v1" / "objects").glob("*/*/manifest.msgpack"))
    if earlier.get("KCOORD_TRUST") == "warn":
        from tests.support.signing import unsigned as strip

        strip(unsigned.parent)
    found, _ = counters(sandbox, **SIGNED)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 0), "by an agent of its own"


@pytest.mark.parametrize(
    "earlier", [{}, {"KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "warn"}, {"KCOORD_SIGNING_KEY": THEIRS}]
)
def test_at_an_explicit_socket_it_runs_without_that_agent_and_says_so_in_one_line(
    sandbox: Sandbox, earlier: dict[str, str]
) -> None:
    socket = {"KCOORD_SOCKET": str(sandbox.root / "one.sock")}
    earlier_job(sandbox, **earlier, **socket)
    found, told = counters(sandbox, **SIGNED, **socket)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 1)
    (line,) = [line for line in told.splitlines() if "kcoord" in line]
    assert "KCOORD_SOCKET" in line
    assert "KCOORD_TRUST" in line


@pytest.mark.parametrize("policy", ["require", "warn"])
def test_a_rank_whose_launcher_keeps_the_key_agrees_with_its_agent(sandbox: Sandbox, policy: str) -> None:
    key = sandbox.root / "keys"
    key.write_text(OURS.replace(":", " "))
    key.chmod(0o600)
    for given in ({"KCOORD_SIGNING_KEY": OURS}, {"KCOORD_SIGNING_KEY_FILE": str(key)}):
        settings = {**given, "KCOORD_TRUST": policy, "KCOORD_LOCAL_DIR": str(sandbox.root / next(iter(given)))}
        found, told = counters(sandbox, *KCOORD, "exec", "--", sys.executable, RANK, "1", "0", **settings)
        assert found["alone"] == 0, told
        assert found["compiles"] + found["store_hits"] == 1


def test_a_launched_rank_is_not_served_by_another_agent_at_its_socket(sandbox: Sandbox) -> None:
    socket = {"KCOORD_SOCKET": str(sandbox.root / "one.sock")}
    earlier_job(sandbox, **socket)
    found, _ = counters(sandbox, *KCOORD, "exec", "--", sys.executable, RANK, "1", "0", **SIGNED, **socket)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 1)


def test_a_job_that_asks_for_nothing_may_use_an_agent_that_requires_signatures(sandbox: Sandbox) -> None:
    """A sidecar's: the other containers of its pod know no keys."""
    socket = {"KCOORD_SOCKET": str(sandbox.root / "one.sock")}
    earlier_job(sandbox, **SIGNED, **socket)
    found, _ = counters(sandbox, **socket)
    assert (found["store_hits"], found["alone"]) == (1, 0)
