#!/usr/bin/env bash
# What:     measures training steps of several models, batches and numbers of ranks in turns, and prints them beside the
#           predictions of `largebatch.plan` from the first of them. docs/planner.md has its table for one machine.
# Hardware: any host, with idle GPUs or cores. The default cases are for two cores of a CPU and 16 GB of memory. Each rank
#           holds two trainers, with and without their reduction, so four ranks of ViT-B/32 would need 25 GB.
# Time:     about 8 minutes for each round on two idle cores.
# Prints:   the commands, a table of each benchmark, and the table with the errors.
# Writes:   OUTPUT/ROUND/CASE/step.csv and step.png
#
# Usage:    mpi_scripts/validate_plan.sh [RANKS:MODEL:MICRO_BATCH:PASSES ...]
#           The first case is the calibration. The last table also has other cases and rounds that OUTPUT has already.
#
# Variables, all optional: OUTPUT (default: runs/validate_plan), ROUNDS (their names, default: "1 2 3"), and those of
#   env.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

cases=("$@")
[ $# -gt 0 ] || cases=(2:vit_b32:8:1 1:vit_b32:8:1 2:vit_b32:16:1 2:vit_b32:8:4 2:vit_b16:4:1
                       2:vit_s16:8:1 4:vit_s16:8:1 2:volo_d1:4:1 4:volo_d1:4:1)
output=${OUTPUT:-runs/validate_plan}
for round in ${ROUNDS:-1 2 3}; do
    for case in "${cases[@]}"; do
        [[ $case =~ ^[0-9]+:[^:]+:[0-9]+:[0-9]+$ ]] || fail "'$case' is no case: expected e.g. 2:vit_b32:8:4"
        IFS=: read -r ranks model micro passes <<<"$case"
        command=("${MPIRUN[@]}" -np "$ranks" "$VENV/bin/python" -m largebatch.benchmark step --data resident --vs none
                 --output "$output/$round/$case" --model "$model" --data.micro_batch_size "$micro"
                 --data.global_batch_size $((ranks * micro * passes)))
        print "${command[@]}"
        "${command[@]}"
    done
done
exec python -m largebatch.plan validate "$output"/*/"${cases[0]}"/step.csv "$output"/*/*/step.csv
