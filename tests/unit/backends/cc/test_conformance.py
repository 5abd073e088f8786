"""The compiler launcher conforms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kcoord.testing.backends import BackendSuite
from tests.support.processes import WITH_KCOORD, with_agents_forked


class TestCompilerLauncher(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    preload = (WITH_KCOORD,)
    error = "RuntimeError"
    changes = ("a source", "a header", "a response file", "CPATH")

    def environment(self, root: Path) -> Mapping[str, str]:
        return with_agents_forked({})
