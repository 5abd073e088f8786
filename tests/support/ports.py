"""TCP ports for servers that have to be told theirs before they start."""

from __future__ import annotations

import random
import socket

_PORTS = range(12_000, 22_000)  # below those that the kernel gives to connections; a Redis Cluster adds 10,000
_reserved: list[socket.socket] = []


def reserve_port() -> int:
    """A port of this host that nobody listens on, and that no other test gets until this process ends.

    The reservation is a name in the kernel's abstract socket namespace, which ends with the process that holds it.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0kcoord-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _reserved.append(name)
        return port
    raise RuntimeError(f"no port of {_PORTS} is free")
