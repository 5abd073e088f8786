"""The compiler launcher conforms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.forked_suite import ForkedSuite
from tests.support.processes import WITH_KCOORD, with_agents_forked


class TestCompilerLauncher(ForkedSuite):
    program = Path(__file__).with_name("subject.py")
    preload = (WITH_KCOORD,)
    error = "RuntimeError"
    changes = ("a source", "a header", "a flag", "CPATH")

    def environment(self, root: Path) -> Mapping[str, str]:
        return with_agents_forked({})
