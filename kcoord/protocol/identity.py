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

UNNAMED = "default"
"""The job of ranks that nothing names."""


@dataclass(frozen=True)
class Identity:
    """A client: its pid in its own pid namespace, its rank and local rank if it has them, and its job.

    `trust` is the policy, and `keys` the name of the keys, that its settings state. None: they state none, and any agent's will
    do. `pool`: it belongs to the node's pool.
    """

    pid: int
    rank: int | None
    local_rank: int | None
    job: str
    trust: str | None = None
    keys: str | None = None
    pool: bool = False

    def hello(self) -> dict[str, Any]:
        return {"op": "hello", "protocol": PROTOCOL_VERSION, **vars(self)}

    @classmethod
    def from_hello(cls, message: Mapping[str, Any]) -> Identity:
        if message.get("op") != "hello" or message.get("protocol") != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer speaks protocol {reprlib.repr(message.get('protocol'))}, this agent {PROTOCOL_VERSION}: "
                "use one version of kcoord on a node"
            )
        trust = optional(message, "trust", str)
        if trust not in (None, *TRUST):
            raise ProtocolError(f"{reprlib.repr(trust)} is no policy of trust that this agent knows")
        return cls(
            field(message, "pid", int),
            optional(message, "rank", int),
            optional(message, "local_rank", int),
            job_name(field(message, "job", str)),
            trust,
            optional(message, "keys", str),
            bool(optional(message, "pool", bool)),
        )

    @classmethod
    def here(cls, settings: Settings, environ: Mapping[str, str] = os.environ) -> Identity:
        """This process, as torchrun, Slurm, Open MPI, MPICH or PMIx numbered it."""
        ranks = ranks_of(environ)
        job = settings.job or environ.get("SLURM_JOB_ID") or UNNAMED
        pool = POOL_SCRIPT in environ
        return cls(os.getpid(), ranks.rank, ranks.local, job, settings.trust, settings.key_name, pool)

    def check_trust(self, agent: Settings) -> None:
        """Raises `ProtocolError` if an agent with these settings trusts more, or other keys, than this client's job does.

        An agent that is stricter serves: the containers beside a sidecar know no keys.
        """
        policy = self.trust
        if policy is None and self.keys is not None and agent.trust is not None:
            policy = "require"  # the default with a key; of two defaults the agent's holds, also without the file
        weaker = policy is not None and TRUST.index(agent.policy) > TRUST.index(policy)
        if weaker or self.keys not in (None, agent.key_name):
            raise ProtocolError(
                f"this agent has KCOORD_TRUST={agent.policy} and {_named(agent.key_name)}, the job "
                f"KCOORD_TRUST={policy or 'require'} and {_named(self.keys)}: give the job a KCOORD_SOCKET of its own"
            )


def _named(keys: str | None) -> str:
    return "no signing key" if keys is None else f"the signing key {reprlib.repr(keys)}"
