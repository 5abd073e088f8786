"""Triton's variables: what changes a kernel is keyed, and nothing else."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kcoord.backends.triton.variables import NEUTRAL_KNOBS, VARIABLES


def test_each_knob_of_triton_is_in_the_key_or_has_a_reason_not_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    from kcoord.backends.triton.knobs import all_knobs, hidden_knobs

    monkeypatch.setattr(knobs, "propagate_env", False)
    before, found = hidden_knobs(), {}
    for section, name, knob in list(all_knobs()):
        holder = getattr(knobs, section)
        with holder.scope():
            setattr(holder, name, "something else")
            found[f"{section}.{name}"] = set(hidden_knobs()) - set(before), getattr(knob, "key", None)
    assert hidden_knobs() == before
    keyed = {name for name, (added, _) in found.items() if added == {(name, "something else")}}
    neutral = {name for name in found if {name, name.partition(".")[0]} & NEUTRAL_KNOBS.keys()}
    assert keyed == found.keys() - neutral
    assert {variable for name in keyed if (variable := found[name][1])} <= VARIABLES.keys()
    assert len(keyed) >= 20


def test_a_knob_that_its_variable_tells_is_in_the_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set in Python or in the environment, it is one kernel."""
    knobs = pytest.importorskip("triton.knobs")
    from kcoord.backends.triton.knobs import hidden_knobs

    monkeypatch.delenv("DISABLE_PTXAS_OPT", raising=False)
    with knobs.nvidia.scope():
        known = hidden_knobs()
        knobs.nvidia.disable_ptxas_opt = True
        assert os.environ["DISABLE_PTXAS_OPT"] == "1"
        assert hidden_knobs() == known
        os.environ["DISABLE_PTXAS_OPT"] = "0"
        assert set(hidden_knobs()) - set(known) == {("nvidia.disable_ptxas_opt", True)}


_PREFIXES = b"TRITON AMDGCN LLVM MLIR NVPTX PTXAS DISABLE ENABLE USE ALLOW STORE PREFER WARP".split()


def test_what_triton_itself_says_to_invalidate_its_cache_is_keyed() -> None:
    libtriton = pytest.importorskip("triton._C.libtriton")
    with Path(libtriton.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        texts = re.findall(rb"\0((?:%b)_\w{3,60})(?=\0)" % b"|".join(_PREFIXES), content)
    names = {text.decode() for text in texts} | VARIABLES.keys()
    program = (
        "import os, sys; os.environ.update(dict.fromkeys(sys.stdin.read().split(), '1'));"
        "[os.environ.pop(n, None) for n in ('TRITON_PLUGIN_PATHS', 'LLVM_PASS_PLUGIN_PATH')];"
        "import importlib.util as u; s = u.spec_from_file_location('libtriton', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); print(*m.get_cache_invalidating_env_vars())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(libtriton.__file__)],
        input=" ".join(names), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    listed = set(done.stdout.split())
    assert len(listed) >= 30
    assert listed <= VARIABLES.keys()
