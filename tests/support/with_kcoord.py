"""kcoord's agent, its command and what ranks call, for a fork server: 0.3 s of CPU, and else of each process."""

from __future__ import annotations

import importlib
import sys

from tests.support.forked import fork_agents

for _name in (
    "kcoord.agent.__main__",
    "kcoord.agent.http_server",
    "kcoord.agent.metrics",
    "kcoord.agent.status_page",
    "kcoord.backends.registry",
    "kcoord.leases.files",
    "kcoord.leases.redis",
    "redis.asyncio",
    "tests.support.agents",
    *(f"kcoord.cli.{name}" for name in ("agent", "explain", "export", "gc", "import_bundle", "keys", "ls", "report")),
    *(f"kcoord.cli.{name}" for name in ("stats", "status", "store", "trace", "verify", "warmup")),
):
    importlib.import_module(_name)
del sys.modules["kcoord.agent.__main__"]  # each agent runs it
fork_agents()
