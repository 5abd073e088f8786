"""The rank of this process, the number of ranks, and its number on the node, from its launcher's variables.

A process often has the variables of two launchers: torchrun's or mpirun's own, and those of the Slurm step or batch script around
that launcher, which number the launcher and not its ranks. So the innermost launcher wins: torchrun, then MPI, then Slurm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This rank, the number of ranks, and this rank's number on its node; None if the launcher does not say."""

    rank: int | None = None
    world: int | None = None
    local: int | None = None


POOL_SCRIPT = "_KCOORD_SCRIPT"
"""The variable of a pool, which is no rank, though it has a rank's variables; it names the job's script."""

HOOK = "_KCOORD_HOOK"
"""The variable by which launchers have torch hook the compilers (`kcoord.autoload`). It harms no Python without kcoord."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Accelerate, Lightning, Kubeflow
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI (Hydra); srun --mpi=pmi2 sets the first two
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # Cray
    ("PMIX_RANK", "", ""),  # any PMIx launcher; srun --mpi=pmix
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)
_NODES = ("SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE", "PET_NNODES")  # the last two are torchrun's


def ranks_of(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The innermost launcher's numbers in `environ`; missing ones come from another launcher that gives the same rank."""
    found = Ranks()
    if POOL_SCRIPT in environ:
        return found
    for rank, world, local in _LAUNCHERS:
        number = _number(environ, rank)
        if number is None or found.rank not in (None, number):
            continue
        of, here = _number(environ, world), _number(environ, local)
        found = Ranks(number, of if found.world is None else found.world, here if found.local is None else found.local)
    return found


def nodes_of(environ: Mapping[str, str] = os.environ) -> int:
    """The number of nodes of this launch; 1 if no launcher says."""
    return max((_number(environ, name) or 1 for name in _NODES), default=1)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
