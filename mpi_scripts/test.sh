#!/usr/bin/env bash
# What:     runs the tests, under real MPI launchers where ranks matter. Sets up .venv first where needed.
# Hardware: two CPU cores and 12 GB of memory; no GPU needed.
# Time:     about 12 minutes on two idle cores; the parts of --all add up to 30. The first set-up takes 3 more.
# Prints:   pytest's output; at the end what this machine cannot run, and what was left out, each with its reason.
#
# Usage:    mpi_scripts/test.sh [--all] [options of pytest, e.g. -k lamb or tests/test_optim.py]
#           --all: also several hosts and Slurm on this machine (-m cluster, as root), and full-size runs (-m evidence)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mpi_scripts/install.sh
# shellcheck disable=SC1091  # made by install.sh
. "${VENV:-.venv}/bin/activate"
tiers=()
if [ "${1:-}" = --all ]; then
    shift
    tiers=(-m "")
fi
# as many processes as there are cores, up to four: each one starts ranks of its own
exec python -m pytest -n auto --maxprocesses 4 --no-loadscope-reorder "${tiers[@]}" "$@"
