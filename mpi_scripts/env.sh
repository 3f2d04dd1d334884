#!/usr/bin/env bash
# What:     what the scripts beside it share: activates .venv, sets the few variables that a job on several hosts
#           needs, each with its reason, and says which of them travel to the other hosts.
# Hardware: any.
# Time:     none.
# Prints:   nothing, but one sentence where .venv or the interface is missing.
#
# Usage:    . mpi_scripts/env.sh
#
# Variables, all optional:
#   VENV       the environment that install.sh made            (default: .venv in the repository)
#   INTERFACE  the network card between the hosts, e.g. eth0   (default: each library looks for one)
#   TRAVEL     further variables of yours for all hosts,       (default: none)
#              e.g. "NCCL_ALGO HOROVOD_TIMELINE"
# Nothing else of the caller's environment goes to other hosts. What ends a job whose host or cable is lost (keepalives
# of Open MPI and ssh) is set by install.sh, for every launcher alike.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { printf '%s\n' "${0##*/}: $*" >&2; exit 1; }
print() { printf '+'; printf ' %q' "$@"; printf '\n'; }

if [ -z "${IMAGE:-}" ]; then                    # an image (train_slurm.sbatch) has a .venv of its own
    export VENV=${VENV:-$ROOT/.venv}            # bind.sh looks for Python there, on every host
    [ -f "$VENV/bin/activate" ] ||
        fail "there is no $VENV: make it with mpi_scripts/install.sh, or say with VENV=... where it is"
    # shellcheck disable=SC1091  # made by install.sh
    . "$VENV/bin/activate"
    command -v mpirun >/dev/null || fail "there is no mpirun on PATH, which MPI=system needs: load your MPI module"
else
    unset VENV
fi

# A rank's last words are there when it dies; otherwise Python keeps up to 8 KB of them back from a pipe.
export PYTHONUNBUFFERED=1
# NCCL names the cause of a failure, instead of "unhandled system error" alone.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Called by its full path Open MPI finds its daemon on the other hosts; "mpirun" alone needs it on their PATH.
# Ranks of a host are neighbours. No core is bound by number: bind.sh does it by GPU.
MPIRUN=("$(command -v mpirun || true)" --map-by slot --bind-to none)
if [ -n "${INTERFACE:-}" ]; then                # with several cards, libraries try addresses that no host can reach
    [ -e "/sys/class/net/$INTERFACE" ] ||
        fail "INTERFACE=$INTERFACE is no network card here, there are: $(cd /sys/class/net && echo *)"
    export OMPI_MCA_btl_tcp_if_include=$INTERFACE   # Open MPI's messages; mpirun hands on its own variables itself
    export OMPI_MCA_oob_tcp_if_include=$INTERFACE   # its daemons
    export PRTE_MCA_prte_if_include=$INTERFACE      # those of Open MPI 5
    export HOROVOD_GLOO_IFACE=$INTERFACE            # Horovod's Gloo
    export NCCL_SOCKET_IFNAME="=$INTERFACE"         # NCCL; without "=" eth1 is eth10, too
fi

# Never the whole environment, as horovodrun would: secrets travel with it, and odd variables break remote shells.
# LD_LIBRARY_PATH: a cluster's modules put the system MPI and CUDA there.
# shellcheck disable=SC2086  # a list of names
for name in VENV PYTHONUNBUFFERED NCCL_DEBUG NCCL_SOCKET_IFNAME HOROVOD_GLOO_IFACE LD_LIBRARY_PATH ${TRAVEL:-}; do
    [ -z "${!name+set}" ] || MPIRUN+=(-x "$name")
done

gpus() {                                        # how many this job may use on this host
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true; fi
}
