#!/usr/bin/env bash
# What:     the part that the other scripts share: prints their heads for --help, activates .venv, sets the few
#           variables that a job on several hosts needs, each with its reason, and lists those that go to other hosts.
# Hardware: any.
# Time:     none.
# Prints:   nothing, or one sentence if .venv or the interface is missing.
#
# Usage:    . mpi_scripts/env.sh
#
# Variables, all optional:
#   VENV       the environment that install.sh made            (default: .venv in the repository)
#   INTERFACE  the network card between the hosts, e.g. eth0   (default: each library looks for one)
#   TRAVEL     more variables to send to all hosts,            (default: none)
#              e.g. "OMP_NUM_THREADS UCX_TLS"
# The variables of Horovod and NCCL go to all hosts, because ranks that differ in them wait for each other for ever.
# Nothing else of the caller's environment goes to other hosts. install.sh sets the keepalives of Open MPI and ssh,
# which end a job if a host or a cable is lost, for every launcher alike.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { printf '%s\n' "${0##*/}: $*" >&2; exit 1; }
print() { printf '+'; printf ' %q' "$@"; printf '\n'; }

case ${1:-} in                                  # the arguments of the script that reads this file
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;;
esac
[[ ${RANKS:-1} =~ ^[0-9\ ]+$ ]] || fail "RANKS is '$RANKS': expected a number of ranks, e.g. 8"

if [ -z "${IMAGE:-}" ]; then                    # an image (train_slurm.sbatch) has a .venv of its own
    export VENV=${VENV:-$ROOT/.venv}            # bind.sh looks for Python there, on every host
    [ -f "$VENV/bin/activate" ] ||
        fail "there is no $VENV: create it with mpi_scripts/install.sh, or give its folder with VENV=..."
    # shellcheck disable=SC1091  # made by install.sh
    . "$VENV/bin/activate"
    command -v mpirun >/dev/null ||
        fail "there is no mpirun on PATH: load your MPI module (MPI=system), or install without --no-horovod"
else
    unset VENV
fi

# A user id without a name (in containers of Kubernetes and OpenShift) has no home. Without HOME, mpirun ends by SIGSEGV;
# horovodrun ends with a traceback if it cannot write there.
if ! id -un >/dev/null 2>&1 && { [ ! -d "${HOME:-}" ] || [ ! -w "$HOME" ]; }; then
    HOME=${TMPDIR:-/tmp}/largebatch-$(id -u)
    export HOME
    mkdir -m 700 "$HOME" 2>/dev/null || true
    if [ -L "$HOME" ] || ! chmod 700 "$HOME" 2>/dev/null; then    # only its owner may
        fail "the user id $(id -u) has no name and no home, and $HOME is not its own: set HOME to a folder of your own"
    fi
fi

# Without this, Python holds back up to 8 KB of output to a pipe, and the last lines of a rank that dies are lost.
export PYTHONUNBUFFERED=1
# NCCL then names the cause of a failure, and not only "unhandled system error".
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# With the full path, Open MPI finds its daemon on the other hosts; with "mpirun" alone, it must be on their PATH.
# Ranks of a host are neighbours. mpirun binds no cores, because bind.sh binds them by GPU.
MPIRUN=("$(command -v mpirun || true)" --map-by slot --bind-to none)
if [ -n "${INTERFACE:-}" ]; then                # with several cards, libraries may try addresses that cannot be reached
    [ -e "/sys/class/net/$INTERFACE" ] ||
        fail "INTERFACE=$INTERFACE is no network card here, there are: $(cd /sys/class/net && echo *)"
    export OMPI_MCA_btl_tcp_if_include=$INTERFACE   # Open MPI's messages; mpirun hands on OMPI_MCA variables itself
    export OMPI_MCA_oob_tcp_if_include=$INTERFACE   # its daemons
    export PRTE_MCA_prte_if_include=$INTERFACE      # those of Open MPI 5
    export HOROVOD_GLOO_IFACE=$INTERFACE            # Horovod's Gloo
    export NCCL_SOCKET_IFNAME="=$INTERFACE"         # NCCL; without "=", eth1 also matches eth10
fi

# Unlike horovodrun, never send the whole environment: it may hold secrets and variables that break remote shells.
# LD_LIBRARY_PATH is sent because the modules of a cluster put the system MPI and CUDA there.
# shellcheck disable=SC2086  # a list of names
for name in VENV PYTHONUNBUFFERED LD_LIBRARY_PATH "${!HOROVOD_@}" "${!NCCL_@}" ${TRAVEL:-}; do
    case ${name#HOROVOD_} in RANK | SIZE | LOCAL_* | CROSS_* | HOSTNAME | CONTROLLER | GLOO_RENDEZVOUS_*) continue ;; esac
    case " ${MPIRUN[*]} " in *" -x $name "*) continue ;; esac   # Open MPI warns of a name that it gets twice
    [ -z "${!name+set}" ] || MPIRUN+=(-x "$name")
done

gpus() {                                        # prints how many GPUs this job may use on this host
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true; fi
}
