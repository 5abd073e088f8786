"""A store is made on purpose: a path with a slip in it, or a mount that is missing, gives each node no store of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import MARKER, NO_STORE
from kcoord.cli import doctor
from kcoord.errors import StoreError
from kcoord.settings import Settings
from tests.support.command import DOCTOR, KCOORD, as_json, kcoord
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish

RANK = PROGRAMS / "generic_rank.py"
_RANK = f"{sys.executable} {RANK}"
EXEC = (*KCOORD, "exec", "--", "bash", "-c")


@pytest.fixture
def sandbox(sandbox: Sandbox) -> Sandbox:
    sandbox.environment["KCOORD_STORE_CREATE"] = "0"
    sandbox.environment["KCOORD_STORE"] = str(sandbox.root / "shared" / "store")
    sandbox.environment["KCOORD_PROFILE"] = "profile"
    return sandbox


def store_of(sandbox: Sandbox) -> Path:
    return Path(sandbox.environment["KCOORD_STORE"])


@pytest.mark.smoke
@pytest.mark.parametrize("there", ["nothing", "an empty directory"], ids=str)
def test_where_there_is_no_store_the_job_runs_says_so_once_and_makes_none(sandbox: Sandbox, there: str) -> None:
    store = store_of(sandbox)
    if there == "an empty directory":  # as a mount point is
        store.mkdir(parents=True)
    done = sandbox.run_kcoord(*EXEC, f"{_RANK} 2 & {_RANK} 2; wait")
    assert done.returncode == 0, done.stderr
    assert "2 compiled" in done.stderr, "the node coordinates its ranks"
    assert done.stderr.count(NO_STORE) == 1, done.stderr
    assert [p for p in sandbox.root.rglob("*") if p.is_relative_to(store) and p != store] == []
    assert store.exists() == (there == "an empty directory")


def test_a_store_that_was_made_on_purpose_is_used(sandbox: Sandbox) -> None:
    made = as_json(sandbox, "store", "init")
    assert made["new"] is True
    assert as_json(sandbox, "store", "init") == {**made, "new": False}
    assert sandbox.run_kcoord(*EXEC, f"{_RANK} 2").returncode == 0
    assert len(Store(store_of(sandbox)).manifests()) == 2


def test_a_store_that_is_made_while_the_job_runs_is_used_from_then_on(sandbox: Sandbox) -> None:
    agent = sandbox.fork_kcoord(*KCOORD, "agent")
    eventually(lambda: list(sandbox.local.glob("*.sock")))
    assert sandbox.run_kcoord(RANK, "1").returncode == 0
    kcoord(sandbox, "store", "init")
    eventually(lambda: "published there again" in str(as_json(sandbox, "status")["notices"]), 40)
    assert sandbox.run_kcoord(RANK, "2").returncode == 0
    eventually(lambda: Store(store_of(sandbox)).manifests())
    kcoord(sandbox, "agent", "--stop")
    finish(agent)


def test_a_setting_lets_agents_make_it(sandbox: Sandbox) -> None:
    assert sandbox.run_kcoord(*EXEC, f"{_RANK} 1", KCOORD_STORE_CREATE="1").returncode == 0
    assert (store_of(sandbox) / MARKER).exists()


def test_a_namespace_is_made_in_a_store_and_nowhere_else(tmp_path: Path) -> None:
    place = tmp_path / "store" / "namespaces" / "team"
    with pytest.raises(StoreError, match="there is no store here"):
        Store(place, creates=False).open()
    assert not (tmp_path / "store").exists()
    Store(tmp_path / "store").open()
    Store(place, creates=False).open()
    assert (place / MARKER).exists()


@pytest.mark.parametrize(
    ("kind", "flags", "nodes", "warned"),
    [
        ("ext4", {"redis_url": "redis://h"}, "1", True),
        ("ext4", {}, "2", True),
        ("ext4", {}, "1", False),
        ("nfs4", {"redis_url": "redis://h"}, "2", False),
    ],
)
def test_doctor_warns_of_a_local_disk_where_there_are_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, flags: dict[str, str], nodes: str, warned: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    monkeypatch.setattr(doctor, "file_system_of", lambda path: kind)
    settings = Settings.from_environ({}, store=str(tmp_path / "store"), store_create="1", **flags)
    found = [each for each in doctor._store(settings) if "each would have its own" in each.finding]
    assert [each.state for each in found] == ["warn"] * warned


def test_no_other_command_makes_a_store(sandbox: Sandbox) -> None:
    for command in (DOCTOR, (*KCOORD, "ls"), (*KCOORD, "import", "nothing.kcb"), (*KCOORD, "verify")):
        sandbox.run_kcoord(*command)
        assert not store_of(sandbox).exists(), command
