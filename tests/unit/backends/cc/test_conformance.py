"""The compiler launcher conforms."""

from __future__ import annotations

from pathlib import Path

from kcoord.testing.backends import BackendSuite


class TestCompilerLauncher(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = "RuntimeError"
    changes = ("a source", "a header", "a response file", "CPATH")
