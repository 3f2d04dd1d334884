#!/usr/bin/env bash
# What:     trains on this machine: one rank per GPU, each bound near its own; or two, unbound, where there is none.
# Hardware: any machine that install.sh has set up.
# Time:     the run's own: 3.5 minutes for the quick start that runs without options (ViT-B/32 on two idle cores).
# Prints:   the command, a line of bind.sh per rank with a GPU, then what largebatch.train prints: recipe, steps, epochs.
#
# Usage:    mpi_scripts/train_local.sh [options of largebatch.train, e.g. --model vit_b32 --data FOLDER]
# The same command again resumes the run.
#
# Variables, all optional: RANKS (default: GPUs of CUDA_VISIBLE_DEVICES, or all, or 2), and those of env.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

found=$(gpus) bind=("$ROOT/mpi_scripts/bind.sh")
[ "$found" -gt 0 ] || { found=2 bind=(); }      # without a GPU there is nothing to be near
command=("${MPIRUN[@]}" -np "${RANKS:-$found}" "${bind[@]}" "$VENV/bin/python" -m largebatch.train "$@")
print "${command[@]}"
exec "${command[@]}"
