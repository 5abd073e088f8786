"""The identity that a client sends first: pid, rank, local rank, job, and the trust that it expects of its agent."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kcoord.errors import ProtocolError
from kcoord.protocol.fields import field, job_name, optional
from kcoord.ranks import POOL_SCRIPT, ranks_of
from kcoord.setting_values import TRUST
from kcoord.settings import PROTOCOL_VERSION, Settings


@dataclass(frozen=True)
class Expected:
    """The policy and the name of the keys that a client's settings state; None: they state none, and any agent's will do."""

    policy: str | None = None
    keys: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> Expected:
        return cls(settings.trust, settings.key_name)

    def check(self, agent: Settings) -> None:
        """Raises `ProtocolError` if an agent with these settings trusts more, or other keys, than this client's job does.

        An agent that is stricter serves: the containers beside a sidecar know no keys.
        """
        policy = self.policy
        if policy is None and self.keys is not None and agent.trust is not None:
            policy = (
                "require"  # the default with a key; of two defaults the agent's is the client's, also without the file
            )
        weaker = policy is not None and TRUST.index(agent.policy) > TRUST.index(policy)
        if weaker or self.keys not in (None, agent.key_name):
            raise ProtocolError(
                f"this agent has KCOORD_TRUST={agent.policy} and {_named(agent.key_name)}, the job "
                f"KCOORD_TRUST={policy or 'require'} and {_named(self.keys)}: give the job a KCOORD_SOCKET of its own"
            )


def _policy(name: str | None) -> str | None:
    if name is not None and name not in TRUST:
        raise ProtocolError(f"{reprlib.repr(name)} is no policy of trust that this agent knows")
    return name


def _named(keys: str | None) -> str:
    return "no signing key" if keys is None else f"the signing key {reprlib.repr(keys)}"


UNNAMED = "default"
"""The job of ranks that nothing names."""


@dataclass(frozen=True)
class Identity:
    """A client: its pid in its own pid namespace, its rank and local rank if it has them, its job, and `Expected`.

    `pool`: it belongs to the node's pool.
    """

    pid: int
    rank: int | None
    local_rank: int | None
    job: str
    expected: Expected = Expected()
    pool: bool = False

    def hello(self) -> dict[str, Any]:
        return {
            "op": "hello",
            "protocol": PROTOCOL_VERSION,
            "pid": self.pid,
            "rank": self.rank,
            "local_rank": self.local_rank,
            "job": self.job,
            "trust": self.expected.policy,
            "keys": self.expected.keys,
            "pool": self.pool,
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
            Expected(_policy(optional(message, "trust", str)), optional(message, "keys", str)),
            bool(optional(message, "pool", bool)),
        )

    @classmethod
    def here(
        cls, job: str | None, environ: Mapping[str, str] = os.environ, expected: Expected = Expected()
    ) -> Identity:
        """This process, as torchrun, Slurm, Open MPI, MPICH or PMIx numbered it."""
        ranks = ranks_of(environ)
        job = job or environ.get("SLURM_JOB_ID") or UNNAMED
        return cls(os.getpid(), ranks.rank, ranks.local, job, expected, POOL_SCRIPT in environ)
