#!/usr/bin/env bash
# What:     trains ViT-B/32 with LAMB on two processes, on the embedded handwritten digits, then measures the
#           accuracy on the held-out digits. Sets up .venv first if needed.
# Hardware: two CPU cores and 8 GB of memory; GPUs are used if there are any.
# Time:     about 3.5 minutes on two idle cores, plus about 3 for the first set-up.
# Prints:   the command, the recipe, one line per epoch, and the held-out top-1, 95 % or more.
#
# Usage:    mpi_scripts/quickstart.sh [options of largebatch.train, e.g. --run.folder runs/mine]
# The same command again resumes the run, or finds it finished; another --run.folder starts a new one.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run_folder() {                      # prints the value of --run.folder, or that of the quick start
    local folder=runs/quickstart
    while [ $# -gt 0 ]; do
        case $1 in
            --run.folder) folder=${2:-$folder} ;;
            --run.folder=*) folder=${1#*=} ;;
        esac
        shift
    done
    echo "$folder"
}

run() { printf '+ %s\n' "$*"; "$@"; }

case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' mpi_scripts/quickstart.sh; exit ;; esac
mpi_scripts/install.sh
# shellcheck disable=SC1091  # made by install.sh
. "${VENV:-.venv}/bin/activate"
folder=$(run_folder "$@")
run horovodrun -np 2 python -m largebatch.train --model vit_b32 "$@" --run.folder "$folder"
run python -m largebatch.validate "$folder"
