"""Cooperative warm-up: recorded, replayed together, never fatal. Real processes, real compiles."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import kcoord
from kcoord.cli.warmup import gpus
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import load_profile
from kcoord.replay.warmup import Walk, divided, warmup
from tests.support.command import KCOORD
from tests.support.living import words_of
from tests.support.profiles import PROGRAM, give, rank, record, said, settings_of
from tests.support.sandbox import PROGRAMS, WITH_TRITON, Sandbox, eventually


def path(directory: Path) -> str:
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))


@pytest.fixture(autouse=True)
def _as_triton_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns without it


def test_what_a_job_compiled_is_recorded_with_its_seconds(sandbox: Sandbox) -> None:
    found = record(sandbox)
    assert {(r.backend, r.module, r.qualname) for r in found} == {("python", "profiled", "make")}
    assert sorted(r.call["args"] for r in found) == [(n,) for n in range(8)]
    assert all(0.05 <= r.seconds < 5 for r in found)
    assert [r.seconds for r in found] == sorted((r.seconds for r in found), reverse=True)


def test_a_warm_job_records_what_it_only_loaded(sandbox: Sandbox) -> None:
    first = str(sandbox.root / "first")
    said(rank(sandbox, 0, 1, "use", KCOORD_LOCAL_DIR=first))
    found = record(sandbox)
    assert all(r.seconds >= 0.05 for r in found), "the seconds that the compile took, not the load"


@pytest.mark.smoke
def test_ranks_share_a_profile_and_then_all_have_all_of_it(sandbox: Sandbox) -> None:
    give(sandbox, record(sandbox, count=12))
    ranks = [rank(sandbox, n, 3, "warm", "12", PROFILE="job", SECONDS_EACH="0.2") for n in range(3)]
    reports = [said(r) for r in ranks]
    assert sum(r["report"]["compiled"] for r in reports) == 12, "each key once"
    assert all(r["report"]["compiled"] + r["report"]["loaded"] == 12 for r in reports)
    assert all(r["report"]["compiled"] > 0 for r in reports), "and every rank takes part"
    assert all(r["texts"] == reports[0]["texts"] for r in reports)
    assert sum(r["counters"]["compiles"] for r in reports) == 12, "the job itself compiles nothing"


def test_what_a_warm_up_finds_there_is_counted_when_it_is_used(sandbox: Sandbox) -> None:
    """Else a summary would count each saved compile twice."""
    found = record(sandbox, count=4)
    give(sandbox, found)
    said(rank(sandbox, 0, 1, "warm", "4", PROFILE="job"))
    counters = said(rank(sandbox, 0, 1, "warm", "4", PROFILE="job"))["counters"]
    assert (counters["requests"], counters["local_hits"], counters["compiles"]) == (4, 4, 0)
    assert counters["saved_seconds"] < 2 * sum(r.seconds for r in found)


def test_what_a_killed_rank_was_at_is_compiled_by_another(sandbox: Sandbox) -> None:
    give(sandbox, record(sandbox, count=4))
    begun = sandbox.root / "begun"
    victim = rank(sandbox, 0, 2, "warm", "4", PROFILE="job", SECONDS_EACH="60", BEGUN=str(begun))
    eventually(begun.exists)
    other = rank(sandbox, 1, 2, "warm", "4", PROFILE="job", SECONDS_EACH="0.2")
    eventually(lambda: len(list(sandbox.local.glob("objects/??/*/kernel"))) == 3, what="all but the victim's")
    victim.kill()
    victim.communicate()
    report = said(other)["report"]
    assert (report["compiled"], report["left"]) == (4, 0)


def test_a_recipe_that_does_not_import_or_compile_is_reported_and_skipped(sandbox: Sandbox) -> None:
    good = record(sandbox, count=2)
    odd = [
        Recipe("python", "no_such_module", "f", {"args": (), "kwargs": {}}, "", 9.0, 1),
        Recipe("python", "profiled", "gone", {"args": (), "kwargs": {}}, "", 8.0, 2),
        Recipe("python", "profiled", "main", {"args": ("use",), "kwargs": {}}, "", 7.0, 3),
        Recipe("python", "profiled", "make", {"args": (1, 2, 3, 4), "kwargs": {}}, "", 6.0, 4),
        Recipe("tomorrow", "m", "f", {}, "", 5.0, 5),
        Recipe("triton", "kernels", "scale", {}, "metal:m9", 4.0, 6),
    ]
    give(sandbox, good + odd)
    found = said(rank(sandbox, 0, 1, "warm", "2", PROFILE="job"))
    assert found["report"]["compiled"] == 2
    assert len(found["report"]["failed"]) == 5
    assert any("no_such_module" in reason for _, reason in found["report"]["failed"])
    assert any("compile_once" in reason for _, reason in found["report"]["failed"]), "nothing else is ever called"


def profiled_module(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    import profiled

    return profiled


def test_a_compile_function_that_takes_its_target_is_warmed_up_for_a_gpu_that_is_not_here(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled = profiled_module(monkeypatch, sandbox)
    report = kcoord.warmup([(profiled.make_for, (5,))], targets=["cuda:90", "hip:gfx942"])
    assert (report.compiled, report.failed) == (2, [])
    there = kcoord.DeviceKey(kcoord.GPUTarget("cuda", 90, 32), 3)
    monkeypatch.setattr("kcoord.keys.live_key.current_device", lambda: there)
    artifact = profiled.make_for(5)
    assert (artifact.path / "kernel").read_text() == "5 for cuda:90"
    assert kcoord.connect().counters.read()["compiles"] == 2, "the rank on that GPU asks for the same key"


def test_its_recipe_names_the_gpu_and_is_replayed_for_it_anywhere(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcoord.rank.coordinator import Coordinator

    profiled = profiled_module(monkeypatch, sandbox)
    monkeypatch.setenv("KCOORD_PROFILE", "job")
    recorded: list[Recipe] = []
    monkeypatch.setattr(Coordinator, "record", lambda self, recipe: recorded.append(recipe))
    there = kcoord.DeviceKey(kcoord.GPUTarget("cuda", 90, 32), 3)
    with monkeypatch.context() as patch:
        patch.setattr("kcoord.keys.live_key.current_device", lambda: there)
        profiled.make_for(6)
    assert {(r.qualname, r.target) for r in recorded} == {("make_for", "cuda:90")}
    assert all(0 < r.seconds < 5 for r in recorded)
    assert kcoord.warmup(recorded[:1]).loaded == 1, "the same key, where there is no GPU"


def test_a_compile_function_without_target_is_not_compiled_for_another_gpu(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compile for the device that is here, under the other one's key."""
    profiled = profiled_module(monkeypatch, sandbox)
    report = kcoord.warmup([(profiled.make, (5,))], targets=["cuda:90"])
    assert report.compiled == 0
    assert "a keyword parameter 'target'" in report.failed[0][1]


def test_a_process_that_is_killed_after_a_compile_has_recorded_it(sandbox: Sandbox) -> None:
    """A compile worker ends without a chance to say anything."""
    code = "import os, profiled; profiled.make(1); os._exit(0)"
    done = sandbox.run_kcoord("-c", code, KCOORD_PROFILE="job", PYTHONPATH=path(PROGRAMS), KCOORD_IDLE_TIMEOUT="0.2")
    assert done.returncode == 0, done.stderr
    eventually(lambda: len(list((sandbox.local / "profiles" / "job").glob("*.recipes"))) == 1)
    assert [r.call["args"] for r in load_profile(settings_of(sandbox), "job")] == [(1,)]


@pytest.mark.parametrize("how", ["named by the command", "run by a shell script"])
def test_exec_records_a_profile_that_nobody_named(sandbox: Sandbox, how: str) -> None:
    command = [sys.executable, str(PROGRAM), "use", "3"]
    if how == "run by a shell script":
        (sandbox.root / "run").write_text(f"exec {sys.executable} {PROGRAM} use 3\n")
        command = ["sh", str(sandbox.root / "run")]
    done = sandbox.run(*KCOORD, "exec", "--", *command, PYTHONPATH=path(PROGRAMS), KCOORD_PROFILE=None)
    assert done.returncode == 0, done.stderr
    (name,) = (directory.name for directory in (sandbox.local / "profiles").iterdir())
    assert name.startswith("auto-profiled.")
    assert len(load_profile(settings_of(sandbox), name)) == 3


def test_a_module_that_exits_when_it_is_imported_does_not_end_the_job(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sandbox.root / "exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(sandbox.root))
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    report = warmup([Recipe("python", "exits", "f", {"args": (), "kwargs": {}}, "", 1.0, 1)])
    assert [reason for _, reason in report.failed] == ["SystemExit: 3"]


def test_nothing_is_compiled_ahead_where_kcoord_is_off(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compiled once more when it is used."""
    begun = sandbox.root / "begun"
    monkeypatch.setenv("BEGUN", str(begun))
    profiled = profiled_module(monkeypatch, sandbox)
    (sandbox.root / "everybodys").mkdir()
    (sandbox.root / "everybodys").chmod(0o777)  # not used
    for variable, value in (("KCOORD_DISABLE", "1"), ("KCOORD_LOCAL_DIR", str(sandbox.root / "everybodys"))):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            report = kcoord.warmup([(profiled.make, (1,))])
            assert (report.compiled, report.failed) == (0, [])
    assert not begun.exists()


def test_a_file_system_that_hangs_does_not_hang_the_job(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    monkeypatch.setattr("kcoord.replay.warmup._LONGEST_READ", 0.2)
    directory = sandbox.local / "profiles" / "hangs"
    directory.mkdir(parents=True)
    (directory / "a.recipes").touch()
    let_go = threading.Event()
    monkeypatch.setattr("kcoord.packs.recipe_files.read_plain", lambda *arguments, **named: let_go.wait() and b"")
    try:
        assert kcoord.warmup("hangs").compiled == 0
        assert "does the file system hang" in caplog.text
    finally:
        let_go.set()


@pytest.mark.parametrize(("gpu", "queued"), [(os.devnull, ["make_for"]), ("/no/gpu", ["make", "make_for"])])
def test_each_rank_compiles_for_its_own_gpu_and_the_rest_is_shared(
    gpu: str, queued: list[str], sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled = profiled_module(monkeypatch, sandbox)

    @kcoord.compile_once(scope=kcoord.Scope.TARGET)
    def local(n: int, *, staging: Path) -> None:
        (staging / "kernel").write_text(f"{n}")

    for_sm90 = Recipe("python", "profiled", "make_for", {"args": (5,), "kwargs": {}}, "cuda:90", 0.0, 1 << 60)
    shared, own = divided([(profiled.make, (5,)), for_sm90, (local, (5,))], [], [gpu])
    assert sorted(recipe.qualname for recipe in shared) == queued
    assert len(shared) + len(own) == 3, "what no recipe can hold is in no queue"
    assert [run(False) for _, run in own] == [("compiled", "")] * len(own)


def test_a_process_of_the_command_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpus() == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == [{}]


def test_a_profile_that_is_not_there_yet_is_told_and_fails_no_job(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    give(sandbox, [Recipe("python", "m", "f", {}, "", 1.0, 1)], "mine")
    report = kcoord.warmup("other")
    assert (report.compiled, report.loaded, report.failed) == (0, 0, [])
    assert "no profile 'other': there are mine" in caplog.text


# Triton

triton = pytest.importorskip("triton")
JOB = """
import json, sys
sys.path.insert(0, {programs!r})
import triton, kernels
hits = []
triton.knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
for factor in range(6):
    kernels.build_scale(factor + 2)
sys.stdout.write(json.dumps({{"compiled": hits.count(False), "loaded": hits.count(True)}}) + "\\n")
"""


def torchrun(sandbox: Sandbox, local: str, *flags: str) -> list[dict[str, int]]:
    script = sandbox.root / "job.py"
    script.write_text(JOB.format(programs=str(PROGRAMS)))
    variables = {"KCOORD_LOCAL_DIR": str(sandbox.root / local), "PYTHONPATH": path(PROGRAMS), "OMP_NUM_THREADS": "1"}
    done = sandbox.run_torchrun("-m", "kcoord_launch.torchrun", "--nproc-per-node", "2", *flags, script, **variables)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> list[Recipe]:
    """What a job of two ranks recorded of six Triton kernels."""
    box = Sandbox(tmp_path_factory.mktemp("p"))
    torchrun(box, "l", "--kcoord-profile", "six")
    return load_profile(settings_of(box, "l"), "six")


def test_triton_kernels_are_recorded_by_import_path_and_specialization(profile: list[Recipe]) -> None:
    assert len(profile) == 6
    assert {(r.backend, r.module, r.qualname, r.target) for r in profile} == {("triton", "kernels", "scale", "cuda:90")}
    assert all(r.call["signature"]["x"] == "*fp32" for r in profile)
    assert all(r.call["options"] == {} for r in profile), "what the target gives by itself is not recorded"


def test_a_profile_is_compiled_without_a_job_for_gpus_that_are_not_here(
    sandbox: Sandbox, profile: list[Recipe]
) -> None:
    give(sandbox, profile, "six")
    arguments = [*KCOORD, "warmup", "six", "--json", "--workers", "2", "--target", "cuda:90", "--target", "hip:gfx942"]
    done = sandbox.run_kcoord(*arguments, PYTHONPATH=path(PROGRAMS))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["compiled"], summary["failed"], summary["keys"]) == (12, [], 12)
    assert torchrun(sandbox, "local") == [{"compiled": 0, "loaded": 6}] * 2, "the keys are those that the job asks for"


def test_a_warm_up_without_hooks_sets_them(sandbox: Sandbox, profile: list[Recipe]) -> None:
    """Else each rank would compile all of it, for itself."""
    give(sandbox, profile, "six")
    code = "import sys, kcoord; r = kcoord.warmup('six'); print(r.compiled, r.loaded)"
    how = {"preload": WITH_TRITON, "PYTHONPATH": path(PROGRAMS)}
    done = [sandbox.run_forked("-c", code, **how, HOME=str(sandbox.root)) for _ in range(2)]
    assert [d.stdout for d in done] == ["6 0\n", "0 6\n"], done[0].stderr
    own = sandbox.run_forked("-c", code, **how, TRITON_CACHE_MANAGER="mine:Manager")
    assert (own.stdout, "kcoord leaves Triton to it" in own.stderr) == ("0 0\n", True)


def test_the_command_understands_its_processes_whatever_modules_print(sandbox: Sandbox, profile: list[Recipe]) -> None:
    give(sandbox, profile, "six")
    text = (PROGRAMS / "kernels.py").read_text()
    prints = "import sys\nsys.stdout.buffer.write(b'\\xff\\n')\nprint('{oops')\nprint('[1]')\nprint('{\"x\": 2}', flush=True)\n"
    (sandbox.root / "kernels.py").write_text(f"{text}\n{prints}")
    done = sandbox.run_kcoord(*KCOORD, "warmup", "six", "--json", "--workers", "1", PYTHONPATH=path(sandbox.root))
    assert json.loads(done.stdout)["compiled"] == 6, done.stderr


def test_a_profile_outlives_a_change_of_the_kernels_source(sandbox: Sandbox, profile: list[Recipe]) -> None:
    changed = sandbox.root / "changed"
    changed.mkdir()
    text = (PROGRAMS / "kernels.py").read_text()
    (changed / "kernels.py").write_text(text.replace("* FACTOR, mask", "* FACTOR + 1, mask"))
    give(sandbox, profile, "six")
    done = sandbox.run_kcoord(*KCOORD, "warmup", "six", "--json", PYTHONPATH=path(changed))
    assert json.loads(done.stdout)["compiled"] == 6, done.stderr


def warned(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the command said, but for its progress."""
    return [line for line in done.stderr.splitlines() if not re.match(r"kcoord: warm-up \w+: \d+ of", line)]


def test_the_command_fails_if_what_it_compiles_reaches_nobody_else(sandbox: Sandbox) -> None:
    """In a pod whose agent cannot work, say: each process compiles all of it, and the next job finds nothing."""
    give(sandbox, record(sandbox, count=2))
    command = [*KCOORD, "warmup", "job", "--workers", "2"]
    done = sandbox.run_kcoord(*command, PYTHONPATH=path(PROGRAMS), KCOORD_SPAWN="0")
    assert done.returncode == 1
    assert done.stderr.count("kcoord: no agent (") == 1, "what its processes say, once"
    assert re.search(r"\d of these compiles are not shared", done.stderr.splitlines()[-1]), done.stderr


def test_the_command_fails_if_nothing_can_be_compiled_where_it_was_started(sandbox: Sandbox) -> None:
    give(sandbox, record(sandbox, count=2))
    done = sandbox.run_kcoord(*KCOORD, "warmup", "job", "--workers", "1")
    assert done.returncode == 1
    first, last = warned(done)
    assert first == "skipped profiled.make: ModuleNotFoundError: No module named 'profiled'"
    assert "where the job's modules can be imported" in last


def test_the_command_leaves_no_agent_behind(sandbox: Sandbox) -> None:
    give(sandbox, [Recipe("python", "profiled", "make_for", {"args": (5,), "kwargs": {}}, "cuda:90", 1.0, 0)])
    done = sandbox.run_kcoord(*KCOORD, "warmup", "job", PYTHONPATH=path(PROGRAMS))
    assert "1 compiled" in done.stdout, done.stderr
    assert warned(done) == []
    assert not sandbox.processes()


def test_the_command_refuses_a_store_that_can_never_be_used_and_does_nothing_where_kcoord_is_off(
    sandbox: Sandbox,
) -> None:
    give(sandbox, record(sandbox, count=1))
    done = sandbox.run_kcoord(*KCOORD, "warmup", "job", PYTHONPATH=path(PROGRAMS), KCOORD_STORE="/proc/nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "KCOORD_STORE=/proc/nowhere" in done.stderr
    done = sandbox.run_kcoord(*KCOORD, "warmup", "job", PYTHONPATH=path(PROGRAMS), KCOORD_DISABLE="1")
    assert (done.returncode, done.stderr) == (0, "kcoord: KCOORD_DISABLE is set: nothing is compiled\n")


def test_a_command_that_is_told_to_end_ends_its_processes_and_itself(sandbox: Sandbox) -> None:
    """As the first process of a container, too: `tests/cluster/k8s/test_pod.py`."""
    give(sandbox, record(sandbox, count=4))
    begun = sandbox.root / "begun"

    def compilers() -> list[psutil.Process]:
        return [p for p in sandbox.processes() if any("kcoord.replay" in word for word in words_of(p))]

    environment = sandbox.env(PYTHONPATH=path(PROGRAMS), SECONDS_EACH="600", BEGUN=str(begun))
    command = [sys.executable, *KCOORD, "warmup", "job", "--workers", "2"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        eventually(begun.exists, what="one compiles")
        assert compilers()
        started.terminate()
        started.communicate(timeout=60)
    assert started.returncode == 143
    eventually(lambda: not compilers(), what="neither its processes nor the pool are left")


def test_where_no_more_processes_can_be_started_those_that_were_end(sandbox: Sandbox) -> None:
    give(sandbox, record(sandbox, count=4))
    few = "import subprocess, sys; real, made = subprocess.Popen, []\n"
    few += "def two(*a, **k):\n    if made[1:]: raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
    few += "    made.append(real(*a, **k)); return made[-1]\n"
    few += "subprocess.Popen = two\n"
    few += "import atexit; atexit.register(lambda: print('ended', *(each.poll() for each in made)))\n"
    code = f"{few}from kcoord.cli import main; main()"
    how = {"PYTHONPATH": path(PROGRAMS), "SECONDS_EACH": "600", "CUDA_VISIBLE_DEVICES": "0,1"}  # a process for each
    done = sandbox.run("-c", code, "warmup", "job", "--workers", "2", **how)
    assert done.returncode == 1
    assert (
        done.stderr
        == "kcoord: a process cannot be started: Resource temporarily unavailable: ask for fewer --workers\n"
    )
    assert done.stdout == "ended 0 -15\n", "the agent, and the one that compiled"


def test_a_kernel_that_cannot_be_imported_leaves_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import ASTSource

    from kcoord.backends.triton.recipes import recipe_of

    sys.path.insert(0, str(PROGRAMS))
    try:
        import kernels
    finally:
        sys.path.remove(str(PROGRAMS))
    signature = {"x": "*fp32", "BLOCK": "constexpr"}
    source = ASTSource(fn=kernels.broken, signature=signature, constexprs={"BLOCK": 64})
    target, options = kernels.SM90, triton.compiler.make_backend(kernels.SM90).parse_options({"num_warps": 8})
    found = recipe_of(source, target, options, 1.0, 0)
    assert found is not None
    assert found.call["options"] == {"num_warps": 8}
    kernels.broken.fn.__module__, kept = "__main__", kernels.broken.fn.__module__
    try:
        assert recipe_of(source, target, options, 1.0, 0) is None
        (tmp_path / "another_script.py").write_text("raise AssertionError('run in the middle of a job')")
        monkeypatch.syspath_prepend(str(tmp_path))
        for elsewhere in ("another_script", "no_module_of_this_name"):
            kernels.broken.fn.__module__ = elsewhere
            assert recipe_of(source, target, options, 1.0, 0) is None
    finally:
        kernels.broken.fn.__module__ = kept


@pytest.mark.parametrize(("rank", "order"), [("0", "041235"), ("1", "150234"), ("2", "201345"), ("3", "301245")])
def test_the_ranks_of_a_node_begin_with_different_keys_of_their_own_lists(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, rank: str, order: str
) -> None:
    begun: list[str] = []
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Walk, "settle", lambda walk, name, step, waits=False: begun.append(name) or "loaded")
    calls = [(SimpleNamespace(__qualname__=str(n)), ()) for n in range(6)]
    warmup(calls, progress=False)  # type: ignore[arg-type]
    assert begun == [*order]
