#!/usr/bin/env bash
# What:     runs the tests, those on several ranks under real MPI launchers. Sets up .venv first if needed.
# Hardware: two CPU cores and 12 GB of memory; no GPU needed.
# Time:     14 to 18 minutes on two idle cores. The first set-up takes 3 more. tests/README.md has the other tiers.
# Prints:   pytest's output; at the end the tests that this machine cannot run or that were left out, with the reasons.
#
# Usage:    mpi_scripts/test.sh [--all] [options of pytest, e.g. -k lamb or tests/test_optim.py]
#           --all: also several hosts and Slurm on this machine (-m cluster, as root), and full-size runs (-m evidence)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' mpi_scripts/test.sh; exit ;; esac
mpi_scripts/install.sh
# shellcheck disable=SC1091  # made by install.sh
. "${VENV:-.venv}/bin/activate"
tiers=()
if [ "${1:-}" = --all ]; then
    shift
    tiers=(-m "")
fi
# One process more than cores, because tests also wait; at most four, because each starts ranks of its own.
processes=$(($(nproc) + 1))
exec python -m pytest -n $((processes < 4 ? processes : 4)) --no-loadscope-reorder "${tiers[@]}" "$@"
