#!/usr/bin/env bash
# What:     runs the whole test suite, jobs under real MPI launchers included. Sets up .venv first where needed.
# Hardware: two CPU cores and 12 GB of memory; no GPU needed.
# Time:     about an hour on two cores, a quarter of it for tests/cluster, plus about 3 minutes for the first set-up.
# Prints:   pytest's output; tests that this machine cannot run are listed with the reason.
#
# Usage:    mpi_scripts/test.sh [options of pytest, e.g. -k lamb or tests/test_lamb.py]

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mpi_scripts/install.sh
# shellcheck disable=SC1091  # made by install.sh
. "${VENV:-.venv}/bin/activate"
exec python -m pytest "$@"
