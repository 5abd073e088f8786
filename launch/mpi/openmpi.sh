#!/bin/bash
# mpirun of Open MPI, each rank under `kcoord exec`: openmpi.sh [mpirun's options] -- COMMAND …
#   launch/mpi/openmpi.sh -n 16 --hostfile hosts -- python train.py
# Open MPI passes only named variables to other nodes: kcoord's, and those of an activated environment, by which kcoord and the
# command are found there.
set -euo pipefail
export KCOORD_JOB="${KCOORD_JOB:-${SLURM_JOB_ID:-mpi-$(hostname)-$$}}" # equal on all nodes
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
	options+=("$1")
	shift
done
[ $# -ge 2 ] || {
	echo "usage: $0 [mpirun's options] -- COMMAND …" >&2
	exit 2
}
shift
for name in $(compgen -e KCOORD_) PATH LD_LIBRARY_PATH PYTHONPATH; do
	[ -z "${!name+is set}" ] || options+=(-x "$name")
done
exec "${MPIRUN:-mpirun}" "${options[@]}" kcoord exec -- "$@"
