"""Helion's searches: the configuration that ranks and jobs agree on. The searches are stand-ins, as no GPU is there."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kcoord.backends import reliances
from kcoord.rank import directories
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox

pytestmark = pytest.mark.skipif(find_spec("helion") is None, reason="needs helion")

KERNELS = PROGRAMS / "helion_kernels.py"


@pytest.fixture
def machine(sandbox: Sandbox) -> Sandbox:
    sandbox.environment |= {"HOME": str(sandbox.root), "WARPS": "8"}
    return sandbox


def outcome(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "said": done.stderr}


def run(machine: Sandbox, *modes: str, own: str = "one", **more: str) -> dict[str, Any]:
    """A process with a cache of Helion's in the directory `own`."""
    return outcome(machine.run(KERNELS, *modes, HELION_CACHE_DIR=own, **more))


def found(machine: Sandbox, *modes: str, own: str = "one", **more: str) -> tuple[int, int]:
    """The number of warps that `run` chooses, and its searches."""
    each = run(machine, *modes, own=own, **more)
    return each["warps"], each["searches"]


def test_ranks_that_search_side_by_side_agree_and_later_ones_do_not_search(machine: Sandbox) -> None:
    choices = [
        machine.start(KERNELS, HELION_CACHE_DIR=f"own{warps}", WARPS=str(warps), TOGETHER="3") for warps in (2, 4, 8)
    ]
    ranks = []
    for each in choices:
        out, err = each.communicate(timeout=240)
        assert each.returncode == 0, err
        ranks.append(json.loads(out.splitlines()[-1]))
    assert [each["searches"] for each in ranks] == [1, 1, 1]
    (agreed,) = {each["warps"] for each in ranks}
    assert found(machine, own="new", WARPS="16") == (agreed, 0)


def test_a_launched_script_takes_the_choice(machine: Sandbox) -> None:
    launch = (*KCOORD, "exec", "--", sys.executable, str(KERNELS), "launched")
    first = outcome(machine.run(*launch, HELION_CACHE_DIR="one"))
    again = outcome(machine.run(*launch, HELION_CACHE_DIR="two", WARPS="4"))
    assert (first["warps"], first["searches"], again["warps"], again["searches"]) == (8, 1, 8, 0)


def test_another_helper_global_or_effort_is_searched_for_anew_and_helions_own_file_is_not_taken(
    machine: Sandbox,
) -> None:
    assert found(machine) == (8, 1)
    for change in ("helper", "global", "full"):
        assert found(machine, change, WARPS="4") == (4, 1), change
    assert found(machine, own="new", WARPS="4") == (8, 0)


def test_helions_own_file_answers_when_no_choice_is_there(machine: Sandbox) -> None:
    assert found(machine) == (8, 1)
    assert found(machine, WARPS="4", KCOORD_LOCAL_DIR=str(machine.root / "other")) == (8, 0)


def test_ranks_of_a_process_group_search_together(machine: Sandbox) -> None:
    assert found(machine, "group", own="one") == (8, 1)
    assert found(machine, "group", own="two", WARPS="4") == (4, 1)


def test_a_search_that_must_not_ask_a_cache_keeps_its_end_and_gives_it_to_nobody(machine: Sandbox) -> None:
    assert found(machine, "force") == (8, 1)
    assert found(machine, own="two", WARPS="4") == (4, 1)
    assert found(machine, "force") == (8, 1)
    assert found(machine, own="three", HELION_SKIP_CACHE="1") == (8, 1)
    assert found(machine, own="four", WARPS="2") == (4, 0)


def test_a_cache_that_the_user_named_is_left_alone(machine: Sandbox) -> None:
    assert found(machine) == (8, 1)
    assert found(machine, own="two", WARPS="4", HELION_AUTOTUNE_CACHE="LocalAutotuneCache") == (4, 1)


def test_without_kcoord_helion_has_its_own_cache(machine: Sandbox) -> None:
    assert found(machine) == (8, 1)
    assert found(machine, own="two", WARPS="4", KCOORD_DISABLE="1") == (4, 1)
    ours = {"HELION_AUTOTUNE_CACHE": "RemoteAutotuneCache"}
    ours["HELION_REMOTE_CACHE_BACKEND"] = "kcoord.backends.helion.configs.SharedConfigs"
    assert found(machine, own="two", WARPS="2", KCOORD_DISABLE="1", **ours) == (4, 0)


@pytest.mark.parametrize("content", [b"\xff", b"[]", b"{}", b'{"config": 1}', b'{"config": "[]"}', b'{"config": "{"}'])
def test_a_choice_that_is_no_configuration_is_none(content: bytes) -> None:
    from kcoord.backends.helion import configs

    assert configs._config(content) is None


def test_a_release_that_lacks_a_name_is_left_alone_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import helion  # noqa: F401

    from kcoord.backends.helion.hooks import TUNING

    monkeypatch.setattr(reliances, "coordinator_in_use", lambda: None)
    assert TUNING.holds()
    for name in TUNING.calls:
        monkeypatch.setattr(reliances, "asides", {})
        with monkeypatch.context() as lacking:
            owner, attribute = TUNING.place(name)
            while any(attribute in vars(each) for each in owner.__mro__):  # of its bases, too
                lacking.delattr(next(each for each in owner.__mro__ if attribute in vars(each)), attribute)
            assert not TUNING.holds(), name
        (why,) = reliances.asides.values()
        assert name.partition(":")[2] in why[1]


def passes(directory: str) -> bool:
    """In a worker that Helion started: whether candidates in `directory` are thrown away."""
    from kcoord.backends.helion import hooks

    hooks.hook()
    return directories.is_temporary(Path(directory, "kernel"))


@pytest.fixture
def workers() -> Iterator[Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool
        pool.close()
        pool.join()


@pytest.mark.parametrize(("name", "are_thrown_away"), [("helion_autotune_1", True), ("triton", False)])
def test_candidates_that_a_searchs_worker_measures_are_thrown_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest, name: str, are_thrown_away: bool
) -> None:
    directory = str(tmp_path / name)
    monkeypatch.setenv("TRITON_CACHE_DIR", directory)
    assert request.getfixturevalue("workers").apply(passes, (directory,)) is are_thrown_away
    assert not passes(directory), "this process is no worker"
