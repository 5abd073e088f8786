"""``kcoord explain``: the relative is of an earlier run, and the line names the edit."""

from __future__ import annotations

import json
import sys

import pytest

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.keys.cache_key import CacheKey
from kcoord.report.differences import relative_of
from tests.support.command import KCOORD, as_json, kcoord
from tests.support.pages import make
from tests.support.sandbox import Sandbox, finish


def key(kind: int, scale: float) -> CacheKey:
    return CacheKey.of("python", "build", kind=kind, scale=scale, env={"A": str(scale)})


def made(key: CacheKey, end: float, rank: int | None = None, pid: int = 0) -> Manifest:
    """Compiled within 2 seconds, until `end`."""
    return Manifest(key, (), 2.0, Origin("n0", pid, rank, "", end + 0.1))


OLD, SIBLING, MINE = key(1, 1.5), key(0, 2.5), key(1, 2.5)
"""An edit made each SCALE. `MINE` differs from its sibling in one factor, from its predecessors in two."""


def relative(found: list[Manifest], mine: Manifest) -> tuple[CacheKey | None, bool]:
    theirs, same_run = relative_of([*found, mine], mine)
    return theirs and theirs.key, same_run


def test_what_the_same_process_compiled_is_of_the_same_run() -> None:
    found = [made(OLD, 500, pid=7), made(SIBLING, 1002, pid=8)]
    assert relative(found, made(MINE, 1005, pid=8)) == (OLD, False)


def test_without_an_older_one_the_nearest_sibling_is_compared_and_called_that() -> None:
    far = made(CacheKey.of("python", "build", kind=7, scale=2.5, env={"A": "x"}), 1003, pid=8)
    assert relative([made(SIBLING, 1002, pid=8), far], made(MINE, 1005, pid=8)) == (SIBLING, True)
    assert relative([], made(MINE, 1005, pid=8)) == (None, False)
    assert relative([made(OLD, 2000, pid=9)], made(MINE, 1005, pid=8)) == (None, False), "a later run's"


def test_pid_0_is_no_process() -> None:
    """A process without an agent does not note its own."""
    assert relative([made(OLD, 500), made(SIBLING, 1002)], made(MINE, 1005)) == (SIBLING, False)


def test_what_a_rank_compiled_before_it_was_started_again_is_of_an_earlier_run() -> None:
    """Whichever rank compiled it, and though a sibling of another rank differs in less."""
    found = [made(OLD, 500, 0, 6), made(SIBLING, 1002, 0, 8)]
    assert relative(found, made(MINE, 1005, 1, 9)) == (OLD, False)


# With real runs

TRAIN = '''\
import hashlib, json, os, sys
from pathlib import Path

import kcoord
import helpers
from kcoord.keys.function.definitions import definitions_of

SCALE = 1.5
text = Path(helpers.__file__).read_text()


@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def scaled(kind: int, *, staging: Path) -> None:
    (staging / "kernel.bin").write_text(f"{kind} {SCALE}")


def listed(kind: int):
    """A key that lists its files."""
    files = {"helpers": hashlib.sha256(text.encode()).hexdigest()}
    key = kcoord.CacheKey.of("test", "listed", files=files, kind=kind)
    key = key.with_details({"definitions": {"helpers": definitions_of(text)}})
    compiles = lambda staging: (staging / "kernel.bin").write_text(str(helpers.helper(kind)))
    return kcoord.connect().get_or_compile(key, compiles, scope=kcoord.Scope.TARGET)


def digest(artifact) -> str:
    return artifact.manifest.key.digest


kinds = [int(os.environ.get("RANK", 0))] if "RANK" in os.environ else [0, 1]
sys.stdout.write(json.dumps([[k, digest(scaled(k)), digest(listed(k))] for k in kinds]) + "\\n")
'''
HELPERS = "def other(x):\n    return x\n\n\ndef helper(x):\n    return x + 1\n"


def run(sandbox: Sandbox, store: dict[str, str], ranks: bool) -> dict[int, tuple[str, str]]:
    """The keys of each kind, of `scaled` and of `listed`: of one process, or of two ranks with a kind each."""
    script = f"{sys.executable} {sandbox.root / 'train.py'}"
    command = f"for r in 0 1; do RANK=$r {script} & done; wait" if ranks else script
    done = finish(sandbox.fork_kcoord(*KCOORD, "exec", "--job", "j", "--", "bash", "-c", command, **store))
    assert done.returncode == 0, done.stderr
    return {kind: (one, two) for line in done.stdout.splitlines() for kind, one, two in json.loads(line)}


@pytest.mark.parametrize("ranks", [False, True], ids=["one process", "two ranks"])
def test_after_an_edit_each_variants_key_is_compared_with_its_own_of_the_run_before(
    sandbox: Sandbox, ranks: bool
) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store")}
    train, helpers = sandbox.root / "train.py", sandbox.root / "helpers.py"
    train.write_text(TRAIN)
    helpers.write_text(HELPERS)
    before = run(sandbox, store, ranks)
    train.write_text(TRAIN.replace("1.5", "2.5"))
    helpers.write_text(HELPERS.replace("x + 1", "x + 20"))
    now = run(sandbox, store, ranks)
    for kind in (0, 1):
        scaled, listed = now[kind]
        told = kcoord(sandbox, "explain", scaled, **store).stdout.splitlines()
        differences = told[told.index(f"from {before[kind][0][:12]} to {scaled[:12]}:") + 1 :]
        assert any("SCALE" in line for line in differences)
        assert not any("kind" in line for line in differences)
        told = kcoord(sandbox, "explain", listed, **store).stdout.splitlines()
        assert told[-2:] == [
            f"from {before[kind][1][:12]} to {listed[:12]}:", "  file helpers: helper changed (line 5)",
        ]  # fmt: skip
        assert "  files: 1 file, which --files lists" in told
        assert not any("5:" in line for line in told[:-2]), "no definition is listed"
    (first, *_) = kcoord(sandbox, "explain", "--files", now[0][1], **store).stdout.splitlines()
    facts = as_json(sandbox, "explain", now[0][1], **store)
    assert first == f"helpers {facts['files']['helpers'][:12]}"
    assert (facts["compared_to"], facts["same_run"]) == (before[0][1], False)
    assert "definitions" not in facts["factors"]
    (difference,) = facts["differences"]
    assert difference["factor"] == "files helpers"
    assert difference["to"] == facts["files"]["helpers"]
    assert facts["lines"] == ["file helpers: helper changed (line 5)"]


def test_a_first_runs_sibling_is_called_that_and_files_are_of_one_key(sandbox: Sandbox) -> None:
    (sandbox.root / "train.py").write_text(TRAIN)
    (sandbox.root / "helpers.py").write_text(HELPERS)
    keys = run(sandbox, {}, ranks=False)
    told = kcoord(sandbox, "explain", keys[1][1]).stdout.splitlines()
    assert told[-2:] == [f"from {keys[0][1][:12]} (of the same run) to {keys[1][1][:12]}:", "  kind: 0 → 1"]
    assert as_json(sandbox, "explain", keys[1][1])["same_run"] is True
    assert as_json(sandbox, "explain", keys[1][1], keys[0][1])["same_run"] is None
    assert "about one KEY" in kcoord(sandbox, "explain", "--files", keys[1][1], keys[0][1], code=2).stderr
    make(sandbox, "other", "plain", n=1)
    done = kcoord(sandbox, "explain", "--files", "plain")
    assert (done.stdout, "no files" in done.stderr) == ("", True)
