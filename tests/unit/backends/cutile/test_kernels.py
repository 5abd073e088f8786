"""cuTile's kernels: what jobs share, and what they do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
from kcoord.backends import reliances
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox
from tests.unit.backends.cutile import IS_INSTALLED

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs cuda-tile[tileiras]")

KERNELS = PROGRAMS / "cutile_kernels.py"


def outcome(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "said": done.stderr}


def run(machine: Sandbox, *modes: str, **more: str) -> dict[str, Any]:
    return outcome(machine.run(KERNELS, *modes, **more))


@pytest.mark.parametrize("torch", ["torch", "late"])
def test_a_launched_script_is_hooked_whether_torch_or_cutile_is_imported_first(sandbox: Sandbox, torch: str) -> None:
    pytest.importorskip("torch")
    launch = (*KCOORD, "exec", "--", sys.executable, str(KERNELS), "launched", torch)
    off = {"CUDA_TILE_CACHE_DIR": "off"}
    first, again = outcome(sandbox.run(*launch, **off)), outcome(sandbox.run(*launch, **off))
    assert (first["compiles"], again["compiles"], again["code"]) == (1, 0, first["code"])


def test_cutiles_own_database_keeps_what_kcoord_compiles_and_loads_and_may_break(sandbox: Sandbox) -> None:
    first = run(sandbox, CUDA_TILE_CACHE_DIR="one")
    for directory in ("two", "one"):
        assert (run(sandbox, CUDA_TILE_CACHE_DIR=directory)["compiles"]) == 0
        assert run(sandbox, CUDA_TILE_CACHE_DIR=directory, KCOORD_DISABLE="1")["compiles"] == 0
        (sandbox.root / directory / "cache.db").write_bytes(b"of no database" * 100)
        broken = run(sandbox, CUDA_TILE_CACHE_DIR=directory)
        assert (broken["compiles"], broken["code"]) == (0, first["code"])


def test_a_kernel_that_cannot_be_written_is_still_the_ranks_own(sandbox: Sandbox) -> None:
    found = run(sandbox, "unwritable", CUDA_TILE_CACHE_DIR="off")
    assert (found["compiles"], list(local_manifests(sandbox.local))) == (1, [])


def test_a_newer_release_is_served_unless_its_argument_is_used(sandbox: Sandbox) -> None:
    off = {"CUDA_TILE_CACHE_DIR": "off"}
    assert (run(sandbox, "newer", **off)["compiles"], run(sandbox, **off)["compiles"]) == (1, 0)
    used = run(sandbox, "newer", "used", **off)
    assert used["compiles"] == 1
    assert "scale is compiled by each rank for itself: no key holds its added" in used["said"]


def test_a_release_that_lacks_a_name_is_left_alone_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from kcoord.backends.cutile.hooks import KERNELS as part

    monkeypatch.setattr(reliances, "coordinator_in_use", lambda: None)
    assert part.holds()
    for name in part.calls:
        monkeypatch.setattr(reliances, "asides", {})
        with monkeypatch.context() as lacking:
            owner, attribute = part.place(name)
            lacking.delattr(owner, attribute)
            assert not part.holds()
        (why,) = reliances.asides.values()
        assert name.partition(":")[2] in why[1]


def test_a_linked_library_is_keyed_by_content(tmp_path: Path) -> None:
    from cuda.tile import _compile  # noqa: F401 - the adapter asks for its release

    from kcoord.backends.cutile.adapter import Bytecode, backend

    library, file = tmp_path / "a.bc", tmp_path / "scale12345678.bytecode"
    file.write_bytes(b"code")
    found = []
    for content in (b"1", b"2"):
        library.write_bytes(content)
        request = Bytecode(file, None, "sm_89", (), (library,), False, None, "", lambda: file)
        found.append(backend.factors(request))
        assert backend.label(request) == "scale"
    assert found[0] != found[1]


def test_the_assembler_is_keyed_with_what_it_runs_and_loads(tmp_path: Path) -> None:
    from cuda.tile import _compile

    from kcoord.keys.tools.toolchain import tools

    found = tools([_compile._find_compiler_bin().path], tmp_path)
    assert found.keys() >= {"tileiras", "tileiras/ptxas"}
    assert any("libnvvm" in name for name in found)
