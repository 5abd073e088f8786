"""The environment of a launched job: its name, and the variables of its ranks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kcoord.backends.registry import child_environ
from kcoord.settings import LONGEST_JOB, SECRETS, Settings, variable
from kcoord.telemetry.spans import plain_text

_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE")  # the last is Open MPI's name of this mpirun
SECRET_VARIABLES = frozenset(map(variable, SECRETS))


def job_name(settings: Settings, given: str | None = None) -> str:
    """The job's name in figures: the same on all nodes if anything names the job, else unique to this launch."""
    if settings.job:
        return settings.job
    for name in (given, *map(os.environ.get, _JOB_IDS)):
        if name and name != "none":
            return plain_text(name, LONGEST_JOB)
    return uuid.uuid4().hex[:12]


def rank_environment(settings: Settings, *, spawn: bool = False, has_kcoord: bool = True) -> dict[str, str]:
    """The settings for ranks, without secrets.

    `has_kcoord`: as `kcoord.backends.registry.child_environ` has it.
    `spawn`: ranks may start an agent, because the agent that was found is another launcher's and may end before they do.
    """
    environment = child_environ(settings, os.environ, has_kcoord=has_kcoord) | settings.to_environ(without=SECRETS)
    environment[variable("spawn")] = str(int(spawn))
    if settings.key_name is not None:
        environment[variable("trust_keys")] = settings.key_name
    if settings.signing_key_file is not None or settings.signing_key is not None:
        # its default depends on the keys, which ranks lack; and a sidecar's key file may be unreadable here
        environment[variable("trust")] = settings.policy
    return environment


def with_variables(environment: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` with `environment`, and without kcoord's secrets."""
    return {name: value for name, value in environ.items() if name not in SECRET_VARIABLES} | dict(environment)


@contextmanager
def applied(environment: Mapping[str, str]) -> Iterator[None]:
    """Set `os.environ` to `with_variables(environment)` for the block."""
    before, meanwhile = dict(os.environ), with_variables(environment)
    os.environ.clear()
    os.environ.update(meanwhile)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
