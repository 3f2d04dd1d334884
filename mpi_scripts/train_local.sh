#!/usr/bin/env bash
# What:     trains on this machine: one rank per GPU, bound near its GPU; or two ranks, not bound, without a GPU.
# Hardware: any machine that install.sh has set up.
# Time:     the time of the run; without options it is the quick start, 3.5 minutes (ViT-B/32 on two idle cores).
# Prints:   the command, a line of bind.sh if there are GPUs, then the recipe, steps and epochs of largebatch.train.
#
# Usage:    mpi_scripts/train_local.sh [options of largebatch.train, e.g. --model vit_b32 --data FOLDER]
# The same command again resumes the run.
#
# Variables, all optional: RANKS (default: GPUs of CUDA_VISIBLE_DEVICES, or all, or 2), and those of env.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

found=$(gpus) bind=("$ROOT/mpi_scripts/bind.sh")
[ "$found" -gt 0 ] || { found=2 bind=(); }      # without a GPU there is nothing to bind to
command=("${MPIRUN[@]}" -np "${RANKS:-$found}" "${bind[@]}" "$VENV/bin/python" -m largebatch.train "$@")
print "${command[@]}"
exec "${command[@]}"
