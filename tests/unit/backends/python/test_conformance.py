"""`compile_once` conforms. Its callers use kcoord by name: another rank's failure is `CompileFailed`."""

from __future__ import annotations

from pathlib import Path

from kcoord.testing.backends import BackendSuite


class TestCompileOnce(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = "CompileError"
    failure_elsewhere = "CompileFailed"
    changes = ("a global",)
