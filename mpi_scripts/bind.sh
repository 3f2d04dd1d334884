#!/usr/bin/env bash
# What:     binds a rank to the cores and the memory of the NUMA node nearest its GPU, and to the network adapter
#           nearest that, then becomes the command. largebatch/bind.py says how.
# Hardware: any. Without GPUs, or without NUMA, the ranks of a host share its cores evenly; with fewer cores than
#           ranks nothing is bound. Memory is bound where numactl is installed (sudo apt-get install numactl).
# Time:     0.1 s, and what nvidia-smi takes.
# Prints:   a line per rank: its GPU, node, CPUs, memory, adapter, and what was not bound and why.
#
# Usage:    mpirun -np 8 --bind-to none mpi_scripts/bind.sh [--dry-run] python -m largebatch.train ...
#           also under horovodrun, srun --cpu-bind=none, torchrun --no-python; --dry-run prints, and runs nothing.
#
# Variables, all optional:
#   VENV         whose Python computes the binding         (default: .venv in the repository)
#   SYSFS, GPUS  to plan for another machine, with --dry-run alone: a copy of its /sys, and a file of what it says to
#                nvidia-smi --query-gpu=index,pci.bus_id,uuid --format=csv,noheader

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${VENV:-$ROOT/.venv}/bin/python
[ -x "$python" ] || python=python3              # only Python's own library is needed
exec "$python" -I "$ROOT/largebatch/bind.py" "$@"
