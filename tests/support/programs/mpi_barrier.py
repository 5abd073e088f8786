"""An MPI program: mpi_barrier.py LIBRARIES [FAILING]. Each rank says who it is once all have met; the rank FAILING then aborts
the job, where the others wait for it. LIBRARIES: names of MPI's C library, with commas between; the first one that loads is used.
"""

from __future__ import annotations

import ctypes
import sys


def load(names: list[str]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(names[0], mode=ctypes.RTLD_GLOBAL)  # Open MPI's plugins look for it there
    except OSError:
        if not names[1:]:
            raise
        return load(names[1:])


mpi = load(sys.argv[1].split(","))
if hasattr(mpi, "ompi_mpi_comm_world"):
    world = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))
else:  # MPICH, and all that share its ABI
    world = ctypes.c_int(0x44000000)  # type: ignore[assignment]
rank, size = ctypes.c_int(), ctypes.c_int()
assert mpi.MPI_Init(None, None) == 0
assert mpi.MPI_Comm_rank(world, ctypes.byref(rank)) == mpi.MPI_Comm_size(world, ctypes.byref(size)) == 0
assert mpi.MPI_Barrier(world) == 0
sys.stdout.write(f"rank {rank.value} of {size.value}\n")
sys.stdout.flush()
if len(sys.argv) > 2:
    if rank.value == int(sys.argv[2]):
        mpi.MPI_Abort(world, 5)
    mpi.MPI_Barrier(world)
mpi.MPI_Finalize()
