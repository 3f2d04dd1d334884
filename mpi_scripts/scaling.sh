#!/usr/bin/env bash
# What:     measures training steps on 1, 2, 4, ... ranks with the same work per rank (weak scaling), and joins the
#           results in one table and one picture: images per second, and the percentage of perfect scaling.
# Hardware: any, with idle GPUs or cores. Ranks that share a core measure the core, not the network.
# Time:     six steps and the start for each number of ranks; with ViT-B/32 on two cores about 3 minutes each.
# Prints:   the commands, a table of each benchmark, and the joined one.
# Writes:   OUTPUT/scaling.csv and scaling.png; OUTPUT/ranks_N/step.csv and step.png
#
# Usage:    mpi_scripts/scaling.sh [-H a:8,b:8] [options of largebatch.benchmark step and of largebatch.train]
#
# Variables, all optional: RANKS (default: "1 2 4 ..." up to the GPUs, or to 2; with -H give it), OUTPUT (default:
#   runs/scaling), IMAGES (per rank and step, default 128: 4 passes of 32), and those of env.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

hosts=()
if [ "${1:-}" = -H ]; then
    [ $# -ge 2 ] || fail "-H needs a value, e.g. -H a:8,b:8"
    [ -n "${RANKS:-}" ] || fail "with -H, give the numbers of ranks to measure, e.g. RANKS=\"8 16 32\""
    hosts=(-H "$2")
    shift 2
fi
found=$(gpus) bind=("$ROOT/mpi_scripts/bind.sh")   # without a GPU there is nothing to bind to
[ "$found" -gt 0 ] || [ ${#hosts[@]} -gt 0 ] || { found=2 bind=(); }
numbers=${RANKS:-$(for ((n = 1; n <= found; n *= 2)); do echo "$n"; done)}
output=${OUTPUT:-runs/scaling}
files=()
for ranks in $numbers; do
    command=("${MPIRUN[@]}" "${hosts[@]}" -np "$ranks" "${bind[@]}"
             "$VENV/bin/python" -m largebatch.benchmark step --vs none --output "$output/ranks_$ranks" --data.global_batch_size $((ranks * ${IMAGES:-128})) "$@")
    print "${command[@]}"
    "${command[@]}"
    files+=("$output/ranks_$ranks/step.csv")
done
exec python -m largebatch.benchmark scaling "${files[@]}" --output "$output"
