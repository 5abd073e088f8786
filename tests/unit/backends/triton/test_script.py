"""Kernels of a script itself: compiled ahead under the keys that the script asks for, and none of its code runs for that."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from kcoord.packs.recipe_files import load_profile
from kcoord.ranks import POOL_SCRIPT
from kcoord.settings import Settings
from tests.support.pools import pool_status, start_agent, started
from tests.support.sandbox import PROGRAMS, Sandbox, eventually

pytest.importorskip("triton")
from kcoord.backends.triton.script import Unreplayable, kernel_of_script

HEAD = """
from __future__ import annotations
import sys
import triton
import triton.language as tl
from triton import jit, Config as C
"""
SCRIPT_TEXT = (
    HEAD
    + """
x = open("/the/script/ran")
WIDTH: tl.constexpr = tl.constexpr(4 * 8)
KIND = tl.float32
CONFIGS = [C({"BLOCK": b}, num_warps=w) for b in (32, 64) for w in [4, 8]]

def prune(configs, named_args, **kwargs):
    return configs

@jit
def helper(value):
    return value * WIDTH

@triton.autotune(configs=CONFIGS, key=["n"], prune_configs_by={"early_config_prune": prune})
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), helper(1.0))

@triton.jit
def plain(x, n, BLOCK: tl.constexpr = 8):
    y = tl.arange(0, BLOCK)
    tl.store(x + y, helper(tl.load(x + y).to(KIND)))

y = x.read()
made = jit(lambda: 0) if y else None
factor = sys.getrecursionlimit()

@triton.jit
def unknown(x):
    tl.store(x, factor)

@x.decorator
@triton.jit
def decorated(x):
    tl.store(x, 1)

if y:
    twice = 1
twice = 2

@triton.jit
def ambiguous(x):
    tl.store(x, twice)
"""
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT_TEXT)
    monkeypatch.setenv(POOL_SCRIPT, str(path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # restored afterwards
    return path


def test_a_kernel_is_defined_with_what_it_names_and_without_the_rest(script: Path) -> None:
    plain = kernel_of_script("plain")
    assert plain.fn.__module__ == "__main__"
    assert (
        plain.fn.__code__.co_firstlineno == SCRIPT_TEXT[: SCRIPT_TEXT.index("@triton.jit\ndef plain")].count("\n") + 1
    )
    names = vars(sys.modules["__main__"])
    assert {"helper", "WIDTH", "KIND", "tl", "plain"} <= names.keys()
    assert not {"x", "y", "CONFIGS", "tuned"} & names.keys()
    assert len(kernel_of_script("tuned").configs) == 4
    assert kernel_of_script("tuned").fn.fn.__globals__["helper"] is plain.fn.__globals__["helper"], "one module"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unknown", "factor is made by code of the script"),
        ("decorated", "decorated is made by code"),
        ("ambiguous", "twice is bound 2 times"),
        ("made", "y is made by code"),
        ("gone", "gone is bound 0 times"),
    ],
)
def test_a_kernel_that_needs_code_of_the_script_is_left_out(script: Path, name: str, why: str) -> None:
    with pytest.raises(Unreplayable, match=why):
        kernel_of_script(name)


def test_a_script_that_cannot_be_read_or_is_not_known_is_said(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text("def broken(:")
    with pytest.raises(Unreplayable, match="cannot be read"):
        kernel_of_script("plain")
    script.unlink()
    with pytest.raises(Unreplayable, match="cannot be read"):
        kernel_of_script("plain")
    monkeypatch.delenv(POOL_SCRIPT)
    with pytest.raises(Unreplayable, match="which this process does not know"):
        kernel_of_script("plain")


JOB = (
    HEAD
    + """
import json, os
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

WIDTH = tl.constexpr(3)
compiled = []

@triton.jit
def helper(value):
    return value * WIDTH

@triton.jit
def scale(x, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, helper(tl.load(x + i)) * FACTOR)

def listen(*, src, metadata, metadata_group, times, cache_hit):
    if not cache_hit:
        compiled.append(metadata["hash"])

if __name__ == "__main__":
    import kcoord
    kcoord.install()
    triton.knobs.compilation.listener = listen
    for factor in range(3):
        constants = {"FACTOR": factor, "BLOCK": 64}
        signature = {"x": "*fp32", "FACTOR": "constexpr", "BLOCK": "constexpr"}
        source = ASTSource(fn=scale, signature=signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    kcoord.connect().close()
    print(json.dumps({"compiled": len(compiled)}))
"""
)


def test_the_pool_compiles_a_scripts_own_kernels_under_the_scripts_keys(sandbox: Sandbox) -> None:
    script = sandbox.root / "train.py"
    script.write_text(JOB)
    environment = {"KCOORD_PROFILE": "six", "KCOORD_IDLE_TIMEOUT": "0.1"}
    first = sandbox.run(script, **environment)
    assert json.loads(first.stdout)["compiled"] == 3, first.stderr
    eventually(lambda: not sandbox.processes(), what="the agent has written the profile, and ended")
    settings = Settings.from_environ(sandbox.env())
    assert {r.module for r in load_profile(settings, "six")} == {"__main__"}
    shutil.rmtree(sandbox.local / "triton")
    start_agent(settings)
    ours = started(sandbox, [str(PROGRAMS)], script=str(script))
    eventually(lambda: pool_status(sandbox)["compiled"] == 3, 60)
    assert json.loads(sandbox.run(script, **environment).stdout)["compiled"] == 0
    ours.close()
