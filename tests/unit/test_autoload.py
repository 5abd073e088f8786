"""Torch calls kcoord at the end of its import: in the environments of kcoord's launchers alone, and never to its harm."""

from __future__ import annotations

import sys

import pytest

from tests.support.command import KCOORD
from tests.support.sandbox import Sandbox

pytest.importorskip("torch")

COMPILE_FX = "import torch._inductor.compile_fx as c; print(hasattr(c._compile_fx_inner, '__kcoord_wrapped__'))"
IMPORTED_BEFORE = f"import torch; torch._import_device_backends(); {COMPILE_FX}"  # the end of torch's import, once more


def test_a_script_that_knows_nothing_of_kcoord_is_hooked_below_a_launcher(sandbox: Sandbox) -> None:
    done = sandbox.run(*KCOORD, "exec", "--", sys.executable, "-c", f"import torch; {COMPILE_FX}")
    assert done.stdout.split() == ["True"], done.stderr


def test_without_a_launcher_it_is_not(sandbox: Sandbox) -> None:
    done = sandbox.run_forked("-c", IMPORTED_BEFORE)
    assert done.stdout.split() == ["False"], done.stderr


def test_settings_that_cannot_be_used_are_told_and_torch_is_imported(sandbox: Sandbox) -> None:
    given = {"TRITON_CACHE_MANAGER": "kcoord.backends.triton.cache_manager:TritonCacheManager"}
    assert sandbox.run_forked("-c", IMPORTED_BEFORE, **given).stdout.split() == ["True"], "else the rest shows nothing"
    done = sandbox.run_forked("-c", IMPORTED_BEFORE, **given, KCOORD_LEASE_TTL="long")
    assert done.stdout.split() == ["False"]
    assert done.stderr.count("this rank runs without kcoord") == 1
