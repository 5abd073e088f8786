"""Code of a graph that was moved to another GPU beside the code that the installed release of torch generates for that GPU.

`make test-moved` runs it with a CUDA wheel of torch. No GPU is used.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton

from kcoord.backends.inductor.moving import without_index

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
NAMES = re.compile(r"\b(raw_stream|stream|semaphores_cuda_)[0-9]+\b")
"""Variables that have the index of the GPU in their names, which nobody reads."""
COMMENTS = re.compile(r"# kernel path: .*|# AOT ID: .*|(?<=\) )[0-9a-f]{12}$", re.MULTILINE)  # and a constant's address


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which torch finds a CUDA runtime without a GPU."""
    place = tmp_path_factory.mktemp("runtime")
    packages = Path(torch.__file__).parents[1]
    headers = [*packages.glob("nvidia/cu*/include"), *packages.glob("nvidia/cuda_runtime/include")]
    headers.append(Path(triton.__file__).parent / "backends" / "nvidia" / "include")
    include = [f"-I{each}" for each in headers]
    command = ["gcc", "-w", "-shared", "-fPIC", *include, "-o", place / "libcuda.so.1", HERE / "stand_in.c"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(place / "libcuda.so.1"), "LD_LIBRARY_PATH": str(place)}


def rank(gpu: int, place: Path, runtime: dict[str, str], *models: str, **variables: str) -> dict[str, Any]:
    """What a rank on this GPU prints, by model; without `models`, of all."""
    environ = os.environ | runtime | variables | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "launch"))),
        "KCOORD_LOCAL_DIR": str(place / "local"),
        "KCOORD_IDLE_TIMEOUT": "5",  # of its agent, which the test leaves
        "TORCHINDUCTOR_CACHE_DIR": str(place / f"torch-{gpu}"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "STAND_IN_GPU": str(gpu),
    }  # fmt: skip
    command = [sys.executable, HERE / "rank.py", *models]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    count = len(models) or len(re.findall("^@model$", (HERE / "rank.py").read_text(), re.MULTILINE))
    assert len(found) == count, done.stderr
    return {each["model"]: each for each in found}


def plain(codes: list[str]) -> list[str]:
    return sorted(COMMENTS.sub("", NAMES.sub(r"\1", code)) for code in codes)


def test_moved_code_is_what_this_release_generates_for_the_gpu(tmp_path: Path, runtime: dict[str, str]) -> None:
    first, second = (rank(gpu, tmp_path / "together", runtime) for gpu in (0, 1))
    native = rank(1, tmp_path / "native", runtime, KCOORD_MOVE="0")
    for name, each in native.items():
        assert plain(second[name]["codes"]) == plain(each["codes"]), name
        assert plain(first[name]["codes"]) != plain(each["codes"]), name
        assert (each["traces"], each["codegens"]) == (1, 2), name
        assert second[name].keys() == {"model", "codes"}, name  # it has loaded all of it
        one, other = (sorted(map(without_index, found[name]["codes"])) for found in (first, second))
        assert one == other, f"{name}: choices of configurations are by this code"


def test_a_rank_pads_a_product_if_the_first_rank_has_found_that_faster_whatever_its_own_times_are(
    tmp_path: Path, runtime: dict[str, str]
) -> None:
    """Else ranks of one unit would have graphs of different keys."""

    def pads(gpu: int, place: str, model: str, padded: str, **variables: str) -> bool:
        found = rank(gpu, tmp_path / place, runtime, model, STAND_IN_PADDED=padded, **variables)[model]
        assert found["codegens"], "it has loaded the graph"
        return "(4, 64)" in found["codes"][0]  # the forward's; the products of the backwards differ

    faster, slower = "0.5", "2"
    for first, second in ((faster, slower), (slower, faster)):
        assert pads(0, f"first {first}", "product", first) is (first == faster)
        assert pads(1, f"first {first}", "another_with_the_product", second) is (first == faster)
        alone = {"KCOORD_DISABLE": "1"}
        assert pads(1, f"alone {first}", "another_with_the_product", second, **alone) is (second == faster)
