"""``kcoord explain``: the relative is of an earlier run, and the line names the edit."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol.identity import UNNAMED
from kcoord.report.runs import relative_of, run_began
from kcoord.settings import Settings
from kcoord.telemetry.span_files import delivery
from kcoord.telemetry.spans import KEY_DIGITS, Process, Span
from tests.support.command import KCOORD, as_json, kcoord
from tests.support.pages import make, save
from tests.support.sandbox import Sandbox, finish


def key(kind: int, scale: float) -> CacheKey:
    return CacheKey.of("python", "build", kind=kind, scale=scale, env={"A": str(scale)})


def made(key: CacheKey, end: float, rank: int | None = None, pid: int = 0) -> Manifest:
    """Compiled within 2 seconds, until `end`."""
    return Manifest(key, (), 2.0, Origin("n0", pid, rank, "", end + 0.1))


def span(kind: str, key: CacheKey, begin: float, seconds: float = 2.0) -> Span:
    return Span(kind, "ok", "python", "build", key.digest[:KEY_DIGITS], begin, seconds)


OLD, OLDER, SIBLING, MINE = key(1, 1.5), key(1, 0.5), key(0, 2.5), key(1, 2.5)
"""An edit made each SCALE. `MINE` differs from its sibling in one factor, from its predecessors in two."""


@pytest.fixture
def where(tmp_path: Path) -> Settings:
    return Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path)})


def relative(where: Settings, found: list[Manifest], mine: Manifest) -> tuple[CacheKey | None, bool]:
    theirs, same_run = relative_of(where, [*found, mine], mine)
    return theirs and theirs.key, same_run


# By processes


def test_what_the_same_process_compiled_is_of_the_same_run(where: Settings) -> None:
    found = [made(OLD, 500, pid=7), made(SIBLING, 1002, pid=8)]
    assert relative(where, found, made(MINE, 1005, pid=8)) == (OLD, False)
    other = made(CacheKey.of("python", "another"), 1000, pid=8)
    assert run_began(where, [other, *found], made(MINE, 1005, pid=8)) == pytest.approx(998.1)


@pytest.mark.parametrize("differs", [{"host": "n1"}, {"pid": 9}, {"rank": 3}], ids=str)
def test_a_pid_of_another_host_or_rank_is_another_process(where: Settings, differs: dict[str, Any]) -> None:
    sibling = made(SIBLING, 1002, pid=8)
    elsewhere = replace(sibling, origin=sibling.origin._replace(**differs))
    assert relative(where, [made(OLD, 500, pid=7), elsewhere], made(MINE, 1005, pid=8)) == (SIBLING, False)


def test_without_an_older_one_the_nearest_sibling_is_compared_and_called_that(where: Settings) -> None:
    far = made(CacheKey.of("python", "build", kind=7, scale=2.5, env={"A": "x"}), 1003, pid=8)
    assert relative(where, [made(SIBLING, 1002, pid=8), far], made(MINE, 1005, pid=8)) == (SIBLING, True)
    assert relative(where, [], made(MINE, 1005, pid=8)) == (None, False)
    assert relative(where, [made(OLD, 2000, pid=9)], made(MINE, 1005, pid=8)) == (None, False), "a later run's"


def test_pid_0_is_no_process(where: Settings) -> None:
    """A process without an agent does not note its own."""
    assert relative(where, [made(OLD, 500), made(SIBLING, 1002)], made(MINE, 1005)) == (SIBLING, False)


# By time lines


def test_what_other_ranks_compiled_is_of_the_same_run(where: Settings, tmp_path: Path) -> None:
    found = [made(OLDER, 400), made(OLD, 500), made(SIBLING, 1002, 0, 8)]
    mine = made(MINE, 1005, 1, 9)
    assert relative(where, found, mine) == (SIBLING, False), "nothing tells that they are one run's"
    save(tmp_path, "j", "n0", {0: [span("compile", OLD, 498)], 1: [span("wait", OLD, 498)]}, "before")
    save(tmp_path, "j", "n0", {2: [span("compile", SIBLING, 1000)], 3: [span("compile", MINE, 1003)]})
    assert relative(where, found, mine) == (OLD, False), "it differs in no more than the older one, and is newer"
    assert run_began(where, [], mine) == 1000


def rows(
    where: Settings, tmp_path: Path, job: str = "j", **nodes: dict[int, list[tuple[str, CacheKey, float]]]
) -> float:
    """The beginning of the run that compiled `MINE` from 1003 to 1005, by these spans of 2 s of nodes' ranks."""
    for node, ranks in nodes.items():
        save(tmp_path, job, node, {rank: [span(*each) for each in spans] for rank, spans in ranks.items()})
    return run_began(where, [], made(MINE, 1005, pid=8))


def test_a_rank_that_begins_late_is_of_the_run_and_one_that_begins_much_later_is_not(
    where: Settings, tmp_path: Path
) -> None:
    assert rows(where, tmp_path, n0={0: [("compile", OLD, 950)], 1: [("compile", MINE, 1003)]}) == 950
    assert rows(where, tmp_path, n0={0: [("compile", OLD, 940)], 1: [("compile", MINE, 1003)]}) == 1003


def test_ranks_that_begin_again_are_of_the_next_run(where: Settings, tmp_path: Path) -> None:
    ranks = {0: [("compile", OLD, 995)], 1: [("load", OLD, 996)]}
    save(tmp_path, "j", "n0", {rank: [span(*each) for each in spans] for rank, spans in ranks.items()}, "before")
    path = save(tmp_path, "j", "n0", {1: [span("wait", SIBLING, 1001)], 0: [span("compile", MINE, 1003)]})
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\xa3pidd", b"\xa3pidX").replace(b"\xa3pide", b"\xa3pidY"))  # 100 and 101
    assert path.read_bytes() != content
    assert rows(where, tmp_path) == 1001


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize(("begin", "run"), [(1001.5, 1001.5), (1000.5, 1003)], ids=["at once", "one after the other"])
def test_a_process_without_a_rank_is_of_the_run_of_those_that_work_meanwhile(
    where: Settings, tmp_path: Path, begin: float, run: float, rank: int | None
) -> None:
    both = [(Process("n0", 7, rank), span("load", OLD, begin)), (Process("n0", 8, None), span("compile", MINE, 1003))]
    path = save(tmp_path, "j", "n0", {})
    path.write_bytes(path.read_bytes() + b"".join(delivery(process, [each]) for process, each in both))
    assert rows(where, tmp_path) == run


def test_of_a_job_without_a_name_ranks_of_other_nodes_are_others_jobs(where: Settings, tmp_path: Path) -> None:
    nodes = {"n0": {0: [("compile", MINE, 1003)]}, "n1": {1: [("load", OLD, 1002)]}}
    assert rows(where, tmp_path, UNNAMED, **nodes) == 1003  # type: ignore[arg-type]
    assert rows(where, tmp_path / "store", UNNAMED) == 1003
    (tmp_path / "traces" / UNNAMED).rename(tmp_path / "traces" / "named")
    assert rows(where, tmp_path) == 1002


def test_the_last_compile_before_the_artifact_made_it(where: Settings, tmp_path: Path) -> None:
    twice = {0: [("compile", MINE, 100)], 1: [("compile", MINE, 1003)]}
    assert rows(where, tmp_path, n0=twice) == 1003
    later = {0: [("compile", MINE, 9000)]}
    assert rows(where, tmp_path, n0=later) == pytest.approx(1003.1), "a later run compiled it again"
    failed = replace(span("compile", MINE, 900), outcome="failed")
    save(tmp_path, "j", "n0", {0: [failed], 1: [span("load", MINE, 950)]})
    assert rows(where, tmp_path) == pytest.approx(1003.1), "nobody made it there"


def test_time_lines_that_cannot_be_read_are_none(where: Settings, tmp_path: Path) -> None:
    (tmp_path / "traces").touch()
    assert relative(where, [made(OLD, 500, pid=7), made(SIBLING, 1002, pid=8)], made(MINE, 1005, pid=8)) == (OLD, False)


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
