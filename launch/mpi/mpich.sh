#!/bin/bash
# mpiexec of MPICH or Intel MPI (Hydra), each rank under `kcoord exec`: mpich.sh [mpiexec's options] -- COMMAND …
#   launch/mpi/mpich.sh -n 16 -f hosts -- python train.py
# Hydra passes the whole environment on.
set -euo pipefail
export KCOORD_JOB="${KCOORD_JOB:-${SLURM_JOB_ID:-mpi-$(hostname)-$$}}" # equal on all nodes
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
	options+=("$1")
	shift
done
[ $# -ge 2 ] || {
	echo "usage: $0 [mpiexec's options] -- COMMAND …" >&2
	exit 2
}
shift
exec "${MPIEXEC:-mpiexec}" "${options[@]}" kcoord exec -- "$@"
