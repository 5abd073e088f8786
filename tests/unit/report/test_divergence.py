"""Ranks whose keys diverge: which groups of ranks, by which factors; and that nobody waits for the others' keys."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.cli.report import line_of
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import GPUTarget
from kcoord.report.differences import Divergence, divergences_of
from kcoord.report.findings import findings_of
from kcoord.report.page import page
from kcoord.report.timeline import Row, Timeline, load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.spans import KEY_DIGITS, Process, Span
from tests.support.command import kcoord as run
from tests.support.profiles import give, rank, record
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish


def key(
    name: str = "matmul", backend: str = "python", details: dict[str, Any] | None = None, **factors: Any
) -> CacheKey:
    """A key as `kcoord.compile_once` makes it, unless told otherwise."""
    usual = {"env": {}, "code": f"def {name}(): …", "arguments": {"n": 64}} if backend == "python" else {}
    return CacheKey.of(backend, name, **{**usual, **factors}).with_details(details or {})


class Job:
    """Ranks of nodes of two (or `per_node`), and what they asked for. Every compile takes 2 seconds."""

    def __init__(self, per_node: int = 2) -> None:
        self.rows: dict[int, list[Span]] = {}
        self.known: dict[str, CacheKey] = {}
        self.per_node, self.compiled = per_node, set[str]()

    def asks(self, ranks: Iterable[int], *keys: CacheKey) -> Job:
        """The first of all ranks that asks for a key compiles it, the others load it."""
        for number in ranks:
            for asked in keys:
                kind = "load" if asked.digest in self.compiled else "compile"
                self.compiled.add(asked.digest)
                self.known[asked.digest] = asked
                where = asked.backend, asked.name, asked.digest[:KEY_DIGITS]
                self.rows.setdefault(number, []).append(
                    Span(kind, "ok", *where, 1e9, 2.0 if kind == "compile" else 0.01)
                )
        return self

    @property
    def timeline(self) -> Timeline:
        found = sorted(self.rows.items())
        return Timeline("j", [Row(Process(f"n{r // self.per_node}", 100 + r, r), spans) for r, spans in found])

    def divergences(self, *, without: Iterable[CacheKey] = ()) -> list[Divergence]:
        gone = {k.digest for k in without}
        known = [k for digest, k in self.known.items() if digest not in gone]
        # what is read from a disk has its details packed
        manifests = [Manifest.decode(Manifest(k, (), 2.0, Origin()).encode()) for k in known]
        return divergences_of(self.timeline, findings_of(self.timeline), manifests)

    def page(self) -> str:
        found = findings_of(self.timeline)
        manifests = [Manifest(k, (), 2.0, Origin()) for k in self.known.values()]
        return page(self.timeline, found, divergences_of(self.timeline, found, manifests))


def groups(found: Divergence) -> dict[tuple[str, ...], str]:
    return {values: ",".join(group.ranges) for values, group in found.groups.items()}


def test_a_variable_that_one_node_has_is_named_once_for_all_kernels() -> None:
    names = [f"k{n}" for n in range(214)]
    job = Job().asks((0, 1), *(key(n, env={"A": "1"}) for n in names))
    job.asks((2, 3), *(key(n, env={"A": "1", "NVCC_APPEND_FLAGS": "-G"}) for n in names))
    (found,) = job.divergences()
    assert found.factors == ("env NVCC_APPEND_FLAGS",)
    assert groups(found) == {("unset",): "0-1", ("-G",): "2-3"}
    assert [g.nodes for g in found.groups.values()] == [["n0"], ["n1"]]
    assert [k.name for k in found.kernels.values()] == names
    assert found.seconds == pytest.approx(214 * 2.0)
    assert line_of(found) == (
        "214 kernels have other keys on other ranks: env NVCC_APPEND_FLAGS: unset on ranks 0-1 of n0; -G on ranks 2-3 of n1 "
        "(set it alike on all nodes)"
    )


def test_each_value_has_its_ranks_the_largest_group_first() -> None:
    job = Job().asks((0, 1), key(tools={"ptxas": "old"})).asks((2, 3, 6, 7), key(tools={"ptxas": "new"}))
    (found,) = job.asks((4, 5), key(tools={"ptxas": "newest"})).divergences()
    assert list(groups(found).items()) == [(("new",), "2-3,6-7"), (("old",), "0-1"), (("newest",), "4-5")]
    assert found.groups[("new",)].nodes == ["n1", "n3"]
    assert found.seconds == 4.0, "each other group compiled it once more"
    job = Job().asks((0, 1, 2), key("a", env={"A": "1"})).asks((3,), key("a", env={"A": "2"}))
    (found,) = job.asks((4,), key("b", env={"A": "1"})).asks(range(5, 9), key("b", env={"A": "2"})).divergences()
    assert list(groups(found).items()) == [(("2",), "3,5-8"), (("1",), "0-2,4")], "over all kernels"


def test_different_causes_are_told_apart() -> None:
    job = Job().asks((0, 1, 2), key(env={"A": "1"}, tools={"t": "1"}))
    found = (
        job.asks((3,), key(env={"A": "2"}, tools={"t": "1"}))
        .asks((4,), key(env={"A": "1"}, tools={"t": "2"}))
        .divergences()
    )
    assert {(d.factors, *groups(d).items()) for d in found} == {
        (("env A",), (("1",), "0-2"), (("2",), "3")),
        (("tools t",), (("1",), "0-2"), (("2",), "4")),
    }


def test_of_several_variants_the_nearest_are_compared() -> None:
    sizes = [key(env={"A": "1"}, arguments={"n": n, "m": m}) for n in (64, 128) for m in (1, 2)]
    others = [key(env={"A": "2"}, arguments={"n": n, "m": m}) for n in (128, 64, 256) for m in (2, 1)]
    (found,) = Job().asks((0, 1), *sizes).asks((2, 3), *others).divergences()
    assert found.factors == ("env A",)
    assert len(found.kernels) == 4


def test_a_value_that_changed_in_a_rank_itself_is_no_divergence() -> None:
    """Also: a job that was started again, under the same name, with another environment."""
    first, second = key(env={"A": "1"}), key(env={"A": "2"})
    assert Job().asks((0, 1, 2, 3), first).asks((0, 1, 2), second).divergences() == []
    assert Job().asks((0, 1), first).asks((1, 2), second).divergences() == [], "rank 1 links them"


# What is legitimate


def test_calls_and_code_that_differ_are_not_told() -> None:
    """Pipeline stages have other sizes, and a warm-up deals out configurations."""
    stages = Job().asks((0, 1), key(arguments={"n": 1024}), key("fused_0", code="a0"))
    stages.asks((2, 3), key(arguments={"n": 2048}), key("fused_0", code="b0"))
    assert stages.divergences() == []
    dealt = Job()
    for number in range(8):
        dealt.asks((number % 4,), key("matmul", "triton", {"options": {"num_warps": number}}, triton_key=str(number)))
    assert dealt.divergences() == []


def test_a_number_of_a_gpu_or_of_a_rank_in_the_code_is_told_with_its_remedy() -> None:
    job = Job(per_node=4)
    for number in range(8):
        job.asks((number,), key("a", device_id=number % 4), key("b", globals={"train.RANK": number}))
    of_gpu, of_rank = sorted(job.divergences(), key=lambda d: d.factors)
    assert groups(of_gpu) == {(str(n),): f"{n},{n + 4}" for n in range(4)}
    assert "Scope.TARGET" in of_gpu.remedy
    assert of_rank.factors == ("globals train.RANK",)
    assert groups(of_rank) == {(str(n),): str(n) for n in range(8)}
    assert "pass it when the kernel is launched" in of_rank.remedy


def test_a_compilers_hash_is_explained_by_its_details() -> None:
    old = key(
        "scale", "triton", {"triton": "3.6.0", "tools": {"ptxas": "1"}, "options": {"new": "1"}}, triton_key="a" * 64
    )
    new = key(
        "scale", "triton", {"triton": "3.9.0", "tools": {"ptxas": "2"}, "options": {"new": "2"}}, triton_key="b" * 64
    )
    (found,) = Job().asks((0, 1), old).asks((2, 3), new).divergences()
    assert found.factors == ("tools ptxas", "triton")
    assert "install the same" in found.remedy


def test_different_gpus_are_no_fault_and_what_else_differs_is_one() -> None:
    small, large = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
    assert Job().asks((0, 1), key(target=small)).asks((2, 3), key(target=large)).divergences() == []
    job = Job().asks((0, 1), key(target=small, env={"A": "1"})).asks((2, 3), key(target=large, env={"A": "2"}))
    assert [d.factors for d in job.divergences()] == [("env A",)]


def test_what_is_gone_from_the_store_is_not_compared() -> None:
    old, new = key(env={"A": "1"}), key(env={"A": "2"})
    job = Job().asks((0, 1), old).asks((2, 3), new).asks((4, 5), key(env={"A": "3"}))
    (found,) = job.divergences(without=[old])
    assert groups(found) == {("2",): "2-3", ("3",): "4-5"}
    assert job.divergences(without=[old, new]) == []


def test_what_is_no_kernel_and_who_is_no_rank_say_nothing() -> None:
    job = Job().asks((0, 1), key(env={"A": "1"})).asks((2, 3), key(env={"A": "2"}))
    manifests = [Manifest(k, (), 2.0, Origin()) for k in job.known.values()]
    nobody = Timeline("j", [Row(Process(r.process.node, r.process.pid, None), r.spans) for r in job.timeline.rows])
    assert divergences_of(nobody, findings_of(nobody), manifests) == []
    aside = Timeline("j", job.timeline.rows)
    for row in aside.rows:
        row.spans = [
            Span(s.kind, s.outcome, s.backend, s.name, s.key, s.begin, s.seconds, 0.0, True) for s in row.spans
        ]
    assert divergences_of(aside, findings_of(aside), manifests) == []
    assert divergences_of(Timeline("j"), findings_of(Timeline("j")), []) == []


# How it is shown


# With real ranks


def test_a_rank_with_a_variable_of_its_own_is_found_and_nobody_waited_for_it(sandbox: Sandbox) -> None:
    pytest.importorskip("torch")
    script = sandbox.root / "train.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['TRITON_DISABLE_LINE_INFO'] = '1'\n"
        f"sys.argv = ['rank.py', '--kernels', '3', '--slow', '0.3']\n"
        f"runpy.run_path({str(PROGRAMS / 'rank.py')!r}, run_name='__main__')\n"
    )
    launch = ("-m", "kcoord_launch.torchrun", "--standalone", "--nproc-per-node=2")
    done = sandbox.run_torchrun(*launch, script, KCOORD_JOB="j")
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [len(r["compiled"]) for r in ranks] == [3, 3], "they have no key in common"
    facts = json.loads(run(sandbox, "report", "j", "--json").stdout)
    (found,) = facts["divergences"]
    assert found["factors"] == ["env TRITON_DISABLE_LINE_INFO"]
    assert [(g["ranks"], g["values"]) for g in found["groups"]] == [("0", ["unset"]), ("1", ["1"])]
    assert found["kernels"] == ["scale"] * 3
    assert found["seconds"] >= 0.9
    timeline = load_timeline(Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)}), "j")
    waits = [s for _, s in timeline.spans() if s.kind == "wait"]
    assert all(s.outcome == "lead" for s in waits), "none waited for what the other compiled"


def stuck(sandbox: Sandbox, begun: Path, **more: str) -> Any:
    """Rank 0 of two, at its first key of a warm-up for a minute and a half."""
    found = rank(sandbox, 0, 2, "warm", "6", PROFILE="job", SECONDS_EACH="90", BEGUN=str(begun), **more)
    eventually(begun.exists)
    return found


def test_in_a_warm_up_what_others_are_stuck_at_is_waited_for_no_longer_than_the_bound(sandbox: Sandbox) -> None:
    give(sandbox, record(sandbox, count=6))
    slow = stuck(sandbox, sandbox.root / "begun", KCOORD_MAX_WAIT="2")
    try:
        waiting = rank(sandbox, 1, 2, "warm", "6", PROFILE="job", KCOORD_MAX_WAIT="2")
        other = json.loads(finish(waiting, 60).stdout.splitlines()[-1])
        assert slow.poll() is None
    finally:
        slow.kill()
        slow.communicate()
    assert (other["report"]["compiled"], other["report"]["left"]) == (6, 0)
    assert other["counters"]["compiles"] == 6, "after the bound it compiled that key itself"
    assert 1.5 < other["counters"]["wait_seconds"] < 30
