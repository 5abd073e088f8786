"""`compile_once` conforms. Its callers use kcoord by name: a failure after another rank's is `CompileFailed`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.forked_suite import ForkedSuite
from tests.support.processes import WITH_KCOORD, with_agents_forked


class TestCompileOnce(ForkedSuite):
    program = Path(__file__).with_name("subject.py")
    preload = (WITH_KCOORD,)
    error = "CompileError"
    failure_elsewhere = "CompileFailed"
    changes = ("a global",)

    def environment(self, root: Path) -> Mapping[str, str]:
        return with_agents_forked({})
