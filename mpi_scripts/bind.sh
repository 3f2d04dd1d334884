#!/usr/bin/env bash
# What:     binds a rank to the cores and the memory of the NUMA node nearest its GPU, and to the network adapter
#           nearest the GPU, then becomes the command. largebatch/launch/bind.py explains how.
# Hardware: any. Without GPUs, or without NUMA, the ranks of a host share its cores evenly; with fewer cores than
#           ranks nothing is bound. Memory is bound if numactl is installed (sudo apt-get install numactl).
# Time:     0.1 s, plus the time of nvidia-smi.
# Prints:   a line for the first rank of each host: its GPU, node, CPUs, memory and adapter, and the parts that are not
#           bound, with the reason. With --dry-run, such a line for every rank.
#
# Usage:    mpirun -np 8 --bind-to none mpi_scripts/bind.sh [--dry-run] python -m largebatch.train ...
#           also under horovodrun, srun --cpu-bind=none, torchrun --no-python; --dry-run runs nothing.
#
# Variables, all optional:
#   VENV         the environment whose Python computes the binding (default: .venv in the repository)
#   SYSFS, GPUS  to plan for another machine, only with --dry-run: a copy of its /sys, and a file with its output of
#                nvidia-smi --query-gpu=index,pci.bus_id,uuid --format=csv,noheader

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${VENV:-$ROOT/.venv}/bin/python
[ -x "$python" ] || python=python3              # bind.py needs only Python's standard library
exec "$python" -I "$ROOT/largebatch/launch/bind.py" "$@"
