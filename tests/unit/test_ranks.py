"""Which rank a process is, whoever launched it."""

from __future__ import annotations

import pytest

from kcoord.protocol.identity import Identity
from kcoord.ranks import POOL_SCRIPT, Ranks, ranks_of
from kcoord.settings import Settings

# What these launchers set was read off processes that they started: torchrun 2.13, Slurm 22.05, Open MPI 4.1, MPICH 4.0.
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "5",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
CRAY = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1"}
PMI2_BY_SRUN = {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}
PMIX_BY_SRUN = {**SRUN, "PMIX_RANK": "5"}
BATCH_SCRIPT = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "77",
}  # Slurm says so itself


@pytest.mark.parametrize("outside", [{}, BATCH_SCRIPT], ids=["alone", "below a batch script"])
@pytest.mark.parametrize(
    "environ",
    [TORCHRUN, SRUN, OPEN_MPI, HYDRA, CRAY, PMI2_BY_SRUN, PMIX_BY_SRUN],
    ids=["torchrun", "srun", "Open MPI", "MPICH", "Cray", "srun --mpi=pmi2", "srun --mpi=pmix"],
)
def test_a_process_is_the_rank_that_its_innermost_launcher_says(
    environ: dict[str, str], outside: dict[str, str]
) -> None:
    assert ranks_of({**outside, **environ}) == Ranks(5, 8, 1)


def test_nobody_is_asked_twice_and_two_launchers_numbers_are_never_mixed() -> None:
    assert ranks_of({**BATCH_SCRIPT, "PMIX_RANK": "5"}) == Ranks(5, None, None)
    assert ranks_of({**BATCH_SCRIPT, "RANK": "5"}) == Ranks(5, None, None)
    assert ranks_of({**SRUN, "RANK": "5"}) == Ranks(5, 8, 1), "a script's own RANK=$SLURM_PROCID"


@pytest.mark.parametrize("text", ["", "-1", "one", "٣", "9" * 5000])
def test_what_is_no_number_is_no_rank(text: str) -> None:
    assert ranks_of({"RANK": text}) == Ranks()


def test_an_identity_has_the_job_of_slurm() -> None:
    who = Identity.here(Settings.from_environ({}), {**BATCH_SCRIPT, **OPEN_MPI})
    assert (who.rank, who.local_rank, who.job) == (5, 1, "77")
    assert Identity.here(Settings.from_environ({}, job="mine"), BATCH_SCRIPT).job == "mine"
    nobody = Identity.here(Settings.from_environ({}), {})
    assert (nobody.rank, nobody.local_rank, nobody.job) == (None, None, "default")


def test_a_pool_has_a_ranks_variables_and_is_no_rank() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", POOL_SCRIPT: ""}
    assert ranks_of(environ) == Ranks()
    who = Identity.here(Settings.from_environ({}), environ)
    assert (who.rank, who.pool) == (None, True)
    assert Identity.from_hello(who.hello()) == who
