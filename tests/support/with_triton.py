"""Triton's modules, and its hash of its own files, for a fork server: 0.8 s of CPU, and else of each process."""

from __future__ import annotations

import triton.compiler
import triton.runtime.autotuner  # noqa: F401
from triton.backends import backends  # noqa: F401
