"""The identity that a client sends first: pid, rank, local rank, job."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kcoord.errors import ProtocolError
from kcoord.protocol.fields import field, job_name, optional
from kcoord.ranks import ranks_of
from kcoord.settings import PROTOCOL_VERSION

UNNAMED = "default"
"""The job of ranks that nothing names."""


@dataclass(frozen=True)
class Identity:
    """A client: its pid in its own pid namespace, its rank and local rank if it has them, and its job."""

    pid: int
    rank: int | None
    local_rank: int | None
    job: str

    def hello(self) -> dict[str, Any]:
        return {
            "op": "hello",
            "protocol": PROTOCOL_VERSION,
            "pid": self.pid,
            "rank": self.rank,
            "local_rank": self.local_rank,
            "job": self.job,
        }

    @classmethod
    def from_hello(cls, message: Mapping[str, Any]) -> Identity:
        if message.get("op") != "hello" or message.get("protocol") != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer speaks protocol {reprlib.repr(message.get('protocol'))}, this agent {PROTOCOL_VERSION}: "
                "use one version of kcoord on a node"
            )
        return cls(
            field(message, "pid", int),
            optional(message, "rank", int),
            optional(message, "local_rank", int),
            job_name(field(message, "job", str)),
        )

    @classmethod
    def here(cls, job: str | None, environ: Mapping[str, str] = os.environ) -> Identity:
        """This process, as torchrun, Slurm, Open MPI, MPICH or PMIx numbered it."""
        ranks = ranks_of(environ)
        return cls(os.getpid(), ranks.rank, ranks.local, job or environ.get("SLURM_JOB_ID") or UNNAMED)
