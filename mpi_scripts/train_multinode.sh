#!/usr/bin/env bash
# What:     trains on several hosts over ssh, with Open MPI: fills the slots of one host after the other, binds each
#           rank near its GPU, and hands on only the variables that env.sh lists.
# Hardware: hosts that reach each other by ssh without a password, see the same repository and .venv under the same
#           path, and the same data. Check them first: python -m largebatch.doctor --hosts a:8,b:8
# Time:     the time of the run; it starts within seconds.
# Prints:   the command, one line of bind.sh per host, then what largebatch.train prints.
#
# Usage:    mpi_scripts/train_multinode.sh -H a:8,b:8 [options of largebatch.train]
#           mpi_scripts/train_multinode.sh --hostfile FILE [options of largebatch.train]
# FILE has a line per host: "a slots=8". The same command again resumes the run.
#
# Variables, all optional: RANKS (default: all slots), and those of env.sh: INTERFACE, TRAVEL, VENV

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case ${1:-} in
    -H | --host | --hostfile) [ $# -ge 2 ] || fail "$1 needs a value, e.g. -H a:8,b:8" ;;
    *) fail "give the hosts first, -H a:8,b:8 or --hostfile FILE, and then the options of largebatch.train" ;;
esac
hosts=("$1" "$2")
shift 2
command=("${MPIRUN[@]}" "${hosts[@]}" ${RANKS:+-np "$RANKS"} "$ROOT/mpi_scripts/bind.sh"
         "$VENV/bin/python" -m largebatch.train "$@")
print "${command[@]}"
exec "${command[@]}"
