"""Torch calls kcoord at the end of its import: in the environments of kcoord's launchers alone, and never to its harm."""

from __future__ import annotations

import sys

import pytest

from tests.support.command import KCOORD
from tests.support.sandbox import Sandbox

pytest.importorskip("torch")

HOOKED = "import torch, torch._inductor.compile_fx as c; print(hasattr(c._compile_fx_inner, '__kcoord_wrapped__'))"


@pytest.mark.parametrize("launcher", ["exec", None])
def test_a_script_that_knows_nothing_of_kcoord_is_hooked_below_a_launcher_alone(
    sandbox: Sandbox, launcher: str | None
) -> None:
    command = (*KCOORD, "exec", "--", sys.executable) if launcher else ()
    done = sandbox.run(*command, "-c", HOOKED)
    assert done.stdout.split() == [str(launcher is not None)], done.stderr


def test_settings_that_cannot_be_used_are_told_and_torch_is_imported(sandbox: Sandbox) -> None:
    done = sandbox.run(
        "-c",
        HOOKED,
        TRITON_CACHE_MANAGER="kcoord.backends.triton.cache_manager:TritonCacheManager",
        KCOORD_LEASE_TTL="long",
    )
    assert done.stdout.split() == ["False"]
    assert done.stderr.count("this rank runs without kcoord") == 1
