#!/usr/bin/env bash
# What:     what the scripts beside it share: activates .venv, sets the few variables that a job on several hosts
#           needs, each with its reason, and says which variables travel to the other hosts.
# Hardware: any.
# Time:     none.
# Prints:   nothing, but one sentence where .venv or an interface is missing.
#
# Usage:    . mpi_scripts/env.sh
#
# Variables, all optional; nothing else of the caller's environment is used, and none of it travels by itself:
#   VENV       the environment that install.sh made           (default: .venv in the repository)
#   INTERFACE  the network interface between the hosts, eth0   (default: the libraries look for one)
#   TRAVEL     names of further variables for other hosts,     (default: none)
#              e.g. "NCCL_DEBUG HOROVOD_TIMELINE"
# What ends a job whose host or cable is lost stands in one place for all launchers: install.sh.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { printf '%s\n' "${0##*/}: $*" >&2; exit 1; }
run() { printf '+ %s\n' "${*@Q}"; "$@"; }

if [ ! -f "${VENV:=$ROOT/.venv}/bin/activate" ]; then
    fail "there is no $VENV: make it with mpi_scripts/install.sh, or say where it is with VENV=..."
fi
# shellcheck disable=SC1091  # made by install.sh
. "$VENV/bin/activate"

# On hosts with several interfaces (docker0, a management network) libraries try addresses that no other host can
# reach, and hang. Each library has a variable of its own.
if [ -n "${INTERFACE:-}" ]; then
    [ -e "/sys/class/net/$INTERFACE" ] ||
        fail "INTERFACE=$INTERFACE is none of this host's: $(cd /sys/class/net && echo *)"
    export OMPI_MCA_btl_tcp_if_include=$INTERFACE   # Open MPI: messages; mpirun itself hands on what begins so
    export OMPI_MCA_oob_tcp_if_include=$INTERFACE   # Open MPI: its own daemons
    export PRTE_MCA_oob_tcp_if_include=$INTERFACE   # Open MPI 5: the same
    export HOROVOD_GLOO_IFACE=$INTERFACE            # Horovod's Gloo
    export NCCL_SOCKET_IFNAME="=$INTERFACE"         # NCCL; without "=" eth1 would stand for eth10, too
fi

# NCCL says why it fails, instead of "unhandled system error" alone; nothing while all is well.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# What a rank prints is there when it dies, and comes in order; without it Python keeps 8 KB back from a pipe.
export PYTHONUNBUFFERED=1

# Never the whole environment: secrets would travel, and odd variables break remote shells. A launcher's -x of a
# variable that is not set is an error for some, so only those that are.
TRAVELS=(NCCL_DEBUG NCCL_SOCKET_IFNAME HOROVOD_GLOO_IFACE PYTHONUNBUFFERED LD_LIBRARY_PATH)
EXPORTS=()
# shellcheck disable=SC2086  # a list of names
for name in "${TRAVELS[@]}" ${TRAVEL:-}; do
    [ -z "${!name+set}" ] || EXPORTS+=(-x "$name")
done
