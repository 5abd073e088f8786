"""``python -m benchmarks.cluster.agents``: the agents of several nodes in one process, so that a machine has room for thousands.

Reads the dilation (`benchmarks.cluster.dilation`), and the sockets and settings of the nodes, as one line of JSON. The end of its
input ends the process. Each is the agent that ``python -m kcoord.agent`` runs; they share an event loop, and with it a core.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading

from benchmarks.cluster.dilation import dilate
from kcoord.agent.__main__ import run_agent
from kcoord.files.private import make_private
from kcoord.settings import Settings


async def _serve(nodes: list[tuple[int, dict[str, str]]]) -> None:
    parsed = [(Settings.from_environ({}, **stated), socket.socket(fileno=fd)) for fd, stated in nodes]
    for settings, _ in parsed:
        make_private(settings.local_dir)
    await asyncio.gather(*(run_agent(settings, listener) for settings, listener in parsed))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    dilation, described = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    dilate(dilation)
    asyncio.run(_serve(described))
