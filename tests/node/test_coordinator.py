"""The generic API, with real ranks and a real agent."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kcoord
from kcoord.artifacts import local, verified
from kcoord.artifacts.manifest import Origin
from kcoord.backends.registry import compilers
from kcoord.errors import ArtifactInvalid, CompileFailed, StoreError
from kcoord.rank.client import AgentClient
from kcoord.rank.coordinator import BUSY, Busy, Compilation, Coordinator, Request
from kcoord.settings import Settings
from tests.support.command import as_json
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish

TARGET = kcoord.Scope.TARGET


@pytest.fixture
def coordinator(sandbox: Sandbox) -> Any:
    made = Coordinator(Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)}))
    yield made
    made.close()


def key(n: int = 0) -> kcoord.CacheKey:
    return kcoord.CacheKey.of("test", f"kernel{n}", number=n)


def write(content: bytes) -> Any:
    return lambda staging: (staging / "kernel.bin").write_bytes(content)


def refuse(staging: Path) -> None:
    raise AssertionError("it should not have been compiled")


def outcomes(coordinator: Coordinator) -> dict[str, float]:
    counters = coordinator.counters.read()
    return {
        name: n
        for name, n in counters.items()
        if n and name not in ("kernels", "ready", "unfinished") and not name.endswith("_seconds")
    }


@pytest.mark.smoke
def test_the_first_request_compiles_and_later_ones_load(coordinator: Coordinator) -> None:
    artifact = coordinator.get_or_compile(key(), write(b"code"))
    assert (artifact.path / "kernel.bin").read_bytes() == b"code"
    assert coordinator.get_or_compile(key(), refuse) is artifact
    other = Coordinator(coordinator.settings)
    assert other.get_or_compile(key(), refuse).path == artifact.path
    other.close()
    assert outcomes(coordinator) == {"requests": 2, "compiles": 1, "memory_hits": 1}
    assert outcomes(other) == {"requests": 1, "local_hits": 1}


def test_a_loaded_handle_is_made_once_and_kept(coordinator: Coordinator) -> None:
    loads = []

    def load(artifact: kcoord.Artifact) -> object:
        loads.append(artifact.path)
        return object()

    handle = coordinator.get_or_compile(key(), write(b"code"), load=load)
    assert coordinator.get_or_compile(key(), refuse, load=load) is handle
    assert len(loads) == 1


def test_what_is_loaded_for_its_effects_is_loaded_once(coordinator: Coordinator) -> None:
    """As `torch.ops.load_library`, which returns None."""
    loads: list[kcoord.Artifact] = []
    for compile in (write(b"code"), refuse):
        assert coordinator.get_or_compile(key(), compile, load=loads.append) is None
    assert len(loads) == 1
    assert outcomes(coordinator) == {"requests": 2, "compiles": 1, "memory_hits": 1}


def test_nested_directories_travel_and_links_do_not(coordinator: Coordinator) -> None:
    def nested(staging: Path) -> None:
        (staging / "a" / "b").mkdir(parents=True)
        (staging / "a" / "b" / "kernel.bin").write_bytes(b"deep")

    artifact = coordinator.get_or_compile(key(1), nested)
    assert (artifact.path / "a" / "b" / "kernel.bin").read_bytes() == b"deep"
    with pytest.raises(ArtifactInvalid, match="neither a plain file"):
        coordinator.get_or_compile(key(2), lambda staging: (staging / "link").symlink_to("/etc/passwd"))


def test_a_compile_function_that_writes_nothing_is_told_so_and_leaves_nothing_staged(coordinator: Coordinator) -> None:
    with pytest.raises(ArtifactInvalid, match="wrote no file"):
        coordinator.get_or_compile(key(), lambda staging: None)
    coordinator.close()
    assert not list(coordinator.settings.local_dir.glob("objects/*/.kcoord/staging/*"))


def broken(staging: Path) -> None:
    raise ZeroDivisionError("the compiler's own words")


def test_after_another_rank_s_failure_a_rank_compiles_for_itself_and_raises_its_own_exception_as_a_cause(
    coordinator: Coordinator,
) -> None:
    def broken_here(staging: Path) -> None:
        raise KeyError("this rank's words")

    with pytest.raises(ZeroDivisionError):
        coordinator.get_or_compile(key(), broken)
    other = Coordinator(coordinator.settings)
    with pytest.raises(CompileFailed) as raised:
        other.get_or_compile(key(), broken_here)
    other.close()
    assert isinstance(raised.value.__cause__, KeyError)
    assert "this rank's words" in str(raised.value)
    assert "the compiler's own words" in str(raised.value), "both failed, and both are shown"
    assert outcomes(other) == {"requests": 1, "failures": 1}


def test_a_failure_of_another_rank_alone_is_no_failure(coordinator: Coordinator) -> None:
    with pytest.raises(ZeroDivisionError):
        coordinator.get_or_compile(key(), broken)
    other = Coordinator(coordinator.settings)
    artifact = other.get_or_compile(key(), write(b"code"))
    other.close()
    assert outcomes(other)["compiles"] == 1
    assert coordinator.get_or_compile(key(), refuse).path == artifact.path, "it is published"


def test_a_compile_whose_directories_go_one_after_the_other_costs_its_job_nothing(
    coordinator: Coordinator,
) -> None:
    """The local directory is removed, and then the temporary one, as a node's cleaner does at night."""
    places: list[Path] = []

    def compile(staging: Path) -> None:
        places.append(staging)
        if len(places) <= 3:
            shutil.rmtree(staging)
        (staging / "kernel.bin").write_bytes(b"code")

    artifact = coordinator.get_or_compile(key(), compile)
    assert (artifact.path / "kernel.bin").read_bytes() == b"code"
    assert len(set(places)) == 4


def test_a_rank_whose_leader_cannot_publish_compiles_for_itself(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up, or a cleaner of temporary files, says nothing about the kernel: `CompileFailed` would end a job."""
    began, waits, lost = threading.Event(), threading.Event(), threading.Event()
    publish = AgentClient.publish

    def too_late(client: AgentClient, lead: Any, key: Any, staging: Path, *rest: Any) -> bool:
        if (staging / "kernel.bin").read_bytes() == b"lost":
            shutil.rmtree(staging)
        return publish(client, lead, key, staging, *rest)

    def slow(staging: Path) -> None:
        (staging / "kernel.bin").write_bytes(b"lost")
        began.set()
        assert waits.wait(20)

    def afterwards(staging: Path) -> None:
        assert lost.wait(20)
        (staging / "kernel.bin").write_bytes(b"code")

    monkeypatch.setattr(AgentClient, "publish", too_late)
    other = Coordinator(coordinator.settings)
    with ThreadPoolExecutor(2) as threads:
        leads = threads.submit(coordinator.get_or_compile, key(), slow)
        assert began.wait(20)
        asks = threads.submit(other.get_or_compile, key(), afterwards)
        eventually(lambda: [f["waiting"] for f in (coordinator.status() or {})["flights"]] != [[]])
        waits.set()
        assert (leads.result(20).path / "kernel.bin").read_bytes() == b"lost", "compiled again"
        lost.set()
        assert (asks.result(20).path / "kernel.bin").read_bytes() == b"code"
    other.close()
    assert outcomes(other) == {"requests": 1, "alone": 1, "compiles": 1}


def test_what_a_rank_has_just_published_is_not_read_and_hashed_again(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    real = verified.open_artifact
    monkeypatch.setattr(verified, "open_artifact", lambda home, digest: looks.append(home) or real(home, digest))

    def compile(staging: Path) -> None:
        assert len(looks) == 1, "it was looked for"
        (staging / "kernel.bin").write_bytes(b"code")

    artifact = coordinator.get_or_compile(key(), compile)
    assert (artifact.path / "kernel.bin").read_bytes() == b"code"
    assert len(looks) == 1


def test_a_compile_that_needs_its_own_key_does_not_wait_for_itself(coordinator: Coordinator) -> None:
    def recursive(staging: Path) -> None:
        inner = coordinator.get_or_compile(key(), write(b"inner"), scope=TARGET)
        (staging / "kernel.bin").write_bytes((inner.path / "kernel.bin").read_bytes())

    artifact = coordinator.get_or_compile(key(), recursive, scope=TARGET)
    assert (artifact.path / "kernel.bin").read_bytes() == b"inner"


def test_sixteen_threads_of_one_rank_compile_a_key_once(coordinator: Coordinator) -> None:
    compiles: list[int] = []
    start = threading.Barrier(16)
    paths = []

    def compile(staging: Path) -> None:
        compiles.append(1)
        (staging / "kernel.bin").write_bytes(b"code")

    def rank() -> None:
        start.wait()
        paths.append(coordinator.get_or_compile(key(), compile).path)

    threads = [threading.Thread(target=rank) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiles) == 1
    assert len(set(paths)) == 1


def run_ranks(sandbox: Sandbox, count: int, kernels: int, **more: str | None) -> list[Any]:
    program = PROGRAMS / "generic_rank.py"
    ranks = [sandbox.fork_kcoord(program, str(kernels), RANK=str(r), LOCAL_RANK=str(r), **more) for r in range(count)]
    done = [finish(p) for p in ranks]
    assert [d.returncode for d in done] == [0] * count, done[0].stderr
    reports = [json.loads(d.stdout) for d in done]
    return [(len(r["compiled"]), r["counters"]) for r in reports]


def test_every_request_has_exactly_one_outcome(sandbox: Sandbox) -> None:
    reports = run_ranks(sandbox, 4, 20)
    assert sum(compiled for compiled, _ in reports) == 20
    sums = {
        name: sum(c[name] for _, c in reports)
        for name in reports[0][1]
        if name not in ("ready", "stood_aside", "unfinished")
    }
    assert sums["requests"] == 80
    assert sums["compiles"] == 20
    assert sums["memory_hits"] + sums["local_hits"] + sums["store_hits"] + sums["waits"] == 60
    assert sums["failures"] == sums["alone"] == 0
    assert sums["saved_seconds"] >= 60 * 0.02


def test_disabled_compiles_privately_and_leaves_no_trace(sandbox: Sandbox) -> None:
    reports = run_ranks(sandbox, 2, 3, KCOORD_DISABLE="1")
    assert [compiled for compiled, _ in reports] == [3, 3]
    assert sandbox.is_untouched
    assert not list((sandbox.root / "tmp").iterdir())
    assert not sandbox.processes()


def test_a_warm_process_starts_no_agent_and_is_counted_all_the_same(sandbox: Sandbox) -> None:
    run_ranks(sandbox, 1, 3)
    for process in sandbox.processes():
        process.terminate()
    eventually(lambda: not sandbox.processes())
    assert run_ranks(sandbox, 1, 3)[0][1]["local_hits"] == 3
    assert not sandbox.processes()
    counters = as_json(sandbox, "stats")
    assert (counters["requests"], counters["compiles"], counters["local_hits"]) == (6, 3, 3)


def test_without_any_agent_ranks_still_share_the_local_tier(sandbox: Sandbox) -> None:
    reports = run_ranks(sandbox, 1, 3, KCOORD_SPAWN="0")
    assert reports[0][1]["alone"] == 3
    assert run_ranks(sandbox, 1, 3, KCOORD_SPAWN="0")[0][1]["local_hits"] == 3


def test_a_forked_child_takes_nothing_from_its_parent(coordinator: Coordinator) -> None:
    kept = coordinator.private(key(), coordinator.home(key().digest))
    (kept.staging / "kernel.bin").write_bytes(b"mine")
    kept.use_privately()
    child = os.fork()
    if child == 0:
        try:
            coordinator.get_or_compile(key(1), write(b"the child's"))
            coordinator.close()  # what its exit would do
            os._exit(0 if outcomes(coordinator) == {"requests": 1, "compiles": 1} else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (kept.staging / "kernel.bin").read_bytes() == b"mine"
    assert outcomes(coordinator) == {"requests": 1, "compiles": 1}
    assert coordinator.get_or_compile(key(1), refuse).path.exists()


FORKS = """
import json, os, sys, kcoord

def build(staging):
    child = os.fork()
    if not child:
        {ends}
    os.waitpid(child, 0)
    (staging / "kernel.bin").write_text("code")

coordinator = kcoord.connect()
artifact = coordinator.get_or_compile(kcoord.CacheKey.of("test", "k"), build)
print(json.dumps([artifact.path == coordinator.home(artifact.key.digest), coordinator.counters.read()]))
"""


@pytest.mark.parametrize("ends", ["sys.exit(0)", "raise RuntimeError('in the child')", "raise OSError('in the child')"])
def test_a_child_that_a_compile_function_forks_leaves_the_compile_to_its_parent_however_it_ends(
    sandbox: Sandbox, ends: str
) -> None:
    """Its exit unwinds the parent's stack, too, in which it gives up, or fails, what its parent compiles."""
    done = sandbox.run("-c", FORKS.format(ends=ends))
    assert done.returncode == 0, done.stderr
    published, counters = json.loads(done.stdout)
    assert published
    assert (counters["compiles"], counters["failures"], counters["alone"]) == (1, 0, 0)


def test_an_agent_that_published_and_ended_before_it_could_say_so_cost_nothing(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publishes_and_dies(lead: Any, key: Any, staging: Path, home: Path, took: float, device: str) -> bool:
        local.publish_local(staging, home, key, took, Origin())
        lead.connection.close()
        return False

    monkeypatch.setattr(AgentClient, "publish", lambda client, *given: publishes_and_dies(*given))
    artifact = coordinator.get_or_compile(key(), write(b"code"))
    assert (artifact.path / "kernel.bin").read_bytes() == b"code"


def test_an_agent_that_wakes_late_finds_the_staged_files_out_of_its_reach(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []

    def sleeps(lead: Any, key: Any, staging: Path, home: Path, took: float, device: str) -> bool:
        given.append(staging)
        lead.connection.close()
        return False

    monkeypatch.setattr(AgentClient, "publish", lambda client, *given: sleeps(*given))
    artifact = coordinator.get_or_compile(key(), write(b"code"))
    with pytest.raises((ArtifactInvalid, StoreError)):
        local.publish_local(given[0], artifact.path, artifact.key, 0.0, Origin())
    assert (artifact.path / "kernel.bin").read_bytes() == b"code"


def test_files_that_no_disk_takes_stay_with_their_process_until_it_ends(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for real: `tests/faults/test_store.py`; here it is the local tier alone that refuses."""

    def refuses(*arguments: Any) -> Any:
        raise StoreError("the disk is full")

    def does_not_answer(lead: Any, *arguments: Any) -> bool:
        lead.connection.close()
        return False

    monkeypatch.setattr(AgentClient, "publish", lambda client, *given: does_not_answer(*given))
    monkeypatch.setattr(local, "publish_local", refuses)
    artifact = coordinator.get_or_compile(key(), write(b"code"))
    assert (artifact.path / "kernel.bin").read_bytes() == b"code"
    coordinator.close()
    assert not artifact.path.exists()


# Requests that do not wait.


def compiled(compilation: object) -> kcoord.Artifact:
    assert isinstance(compilation, Compilation)
    (compilation.staging / "kernel.bin").write_bytes(b"code")
    return compilation.publish()


def test_what_a_leader_keeps_for_itself_is_the_next_ranks_to_compile(coordinator: Coordinator) -> None:
    asked = Request(key(), coordinator.home(key().digest))
    led = coordinator.request(asked)
    assert isinstance(led, Compilation)
    write(b"mine")(led.staging)
    led.use_privately()
    other = Coordinator(coordinator.settings)
    found = other.request(asked)  # though the first one's task is at hand still
    assert isinstance(found, Compilation)
    assert found.lead is not None
    found.give_up()
    other.close()


def test_a_request_that_does_not_wait_is_busy_and_counted_nowhere_until_it_is_answered(
    coordinator: Coordinator,
) -> None:
    other, home = Coordinator(coordinator.settings), coordinator.home(key().digest)
    first = coordinator.request(Request(key(), home), wait=False)
    assert other.request(Request(key(), home), wait=False) is BUSY
    assert isinstance(BUSY, Busy)
    assert not any(other.counters.read().values())
    artifact = compiled(first)
    found = other.request(Request(key(), home), wait=False)
    assert isinstance(found, kcoord.Artifact)
    assert found.path == artifact.path
    other.close()
    assert outcomes(coordinator) == {"requests": 1, "compiles": 1}
    assert outcomes(other) == {"requests": 1, "local_hits": 1}


def test_a_request_that_does_not_wait_compiles_alone_if_nobody_coordinates(sandbox: Sandbox) -> None:
    alone = Coordinator(Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local), "KCOORD_SPAWN": "0"}))
    compiled(alone.request(Request(key(), alone.home(key().digest)), wait=False))
    alone.close()
    assert outcomes(alone) == {"requests": 1, "compiles": 1, "alone": 1}


# compile_once


@pytest.fixture
def here(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    yield kcoord.connect()
    kcoord.connect().close()


FACTOR = 3


def test_the_decorator_needs_no_arguments(here: Coordinator) -> None:
    @kcoord.compile_once
    def bare(*, staging: Path) -> None:
        (staging / "kernel.bin").write_text("bare")

    assert (bare().path / "kernel.bin").read_text() == "bare"


@kcoord.compile_once(scope=TARGET)
def build(config: dict[str, int], times: int = 2, *, staging: Path) -> None:
    (staging / "kernel.bin").write_text(str(config["size"] * times * FACTOR))


def test_what_changes_during_the_compile_is_not_published(here: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    @kcoord.compile_once(scope=TARGET, ignore=["monkeypatch"])
    def torn(*, staging: Path) -> None:
        before = FACTOR
        monkeypatch.setattr(f"{__name__}.FACTOR", 9)  # as another thread would
        (staging / "kernel.bin").write_text(f"{before} {FACTOR}")

    with pytest.raises(kcoord.GlobalsDrift, match="changes what it reads itself"):
        torn()
    assert not list(here.settings.local_dir.glob("objects/??/?*/kernel.bin"))


def test_connect_gives_one_coordinator_until_a_setting_changes(here: Coordinator, tmp_path: Path) -> None:
    assert kcoord.connect() is here
    other = kcoord.connect(local_dir=str(tmp_path))
    assert other is not here
    assert other.settings.local_dir == tmp_path


def test_a_library_and_a_script_with_settings_of_their_own_have_a_coordinator_each_however_often_they_ask(
    here: Coordinator,
) -> None:
    """One for each call would keep a connection, and what was loaded, until the process has no descriptor left."""
    made = {id(kcoord.connect(**flags)) for flags in ({"namespace": "library"}, {}) * 5}
    assert len(made) == 2
    assert kcoord.connect() is here


def test_install_sets_what_triton_reads_and_is_idempotent(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen/by/the/user")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(sandbox.root))
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    assert kcoord.install() == kcoord.install() == [each.name for each in compilers() if each.modules]
    assert os.environ["TRITON_CACHE_MANAGER"] == "kcoord.backends.triton.cache_manager:TritonCacheManager"
    assert os.environ["TRITON_CACHE_DIR"] == "/chosen/by/the/user"
    monkeypatch.delenv("TRITON_CACHE_MANAGER")


def test_install_leaves_a_manager_of_the_users_own(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "mine:Manager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(sandbox.local))
    assert kcoord.install() == [each.name for each in compilers() if each.modules and each.name != "triton"]
    assert os.environ["TRITON_CACHE_MANAGER"] == "mine:Manager"
