"""Triton as after a first compile, and kcoord before its hooks, for a fork server: 0.3 s of CPU, and else of each process."""

from __future__ import annotations

import triton.compiler.code_generator
import triton.experimental.gluon
import triton.runtime.autotuner  # noqa: F401
from triton.backends import backends  # noqa: F401

import kcoord.backends.triton.recipes
import kcoord.files.atomic
import kcoord.keys.function.walk
import kcoord.rank.coordinator
import kcoord.replay.process  # noqa: F401
from tests.support.forked import fork_agents, fork_pools

fork_agents()
fork_pools()
