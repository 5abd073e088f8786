"""Inductor's backend conforms."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.testing.backends import BackendSuite
from tests.support.sandbox import WITH_TORCH

pytest.importorskip("torch._inductor")


class TestInductor(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = "InductorError"
    preload = (WITH_TORCH,)
    interrupted = "InductorError"  # torch wraps what a signal's handler raises
    changes = ("a setting",)
