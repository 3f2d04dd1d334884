#!/usr/bin/env bash
# What:     fine-tunes a VOLO at its published higher resolution with token labels, then measures it.
# Hardware: 8 GPUs, as published. Fewer GPUs give the same result with more passes per step; HOSTS for several hosts.
# Time:     40 epochs of ImageNet-1K (30 and 10 of cooldown); not measured yet.
# Prints:   the commands, the recipe, one line per epoch, and the exact top-1 and top-5.
#
# Usage:    mpi_scripts/finetune_volo.sh RECIPE WEIGHTS TFRECORD_FOLDER [options of largebatch.train]
# RECIPE:   volo_d1_384 volo_d2_384 volo_d3_448 volo_d4_448 volo_d5_448 volo_d5_512
# WEIGHTS:  a run folder, or a file of the zoo's, timm's or the authors' weights at 224 px
# The shards need label maps: python -m largebatch.pack token-labels. The same command again resumes the run.
#
# Variables, all optional: HOSTS (a:8,b:8: on several hosts), RANKS, and those of env.sh

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=mpi_scripts/env.sh
. "$here/env.sh"

[ $# -ge 3 ] || fail "give a recipe (volo_d1_384, ...), weights at 224 px, and a folder of TFRecords"
recipe=$1 weights=$2 data=$3
shift 3
options=(--recipe "$recipe" --init-from "$weights" --data "$data" --run.folder "runs/$recipe" "$@")
if [ -n "${HOSTS:-}" ]; then "$here/train_multinode.sh" -H "$HOSTS" "${options[@]}"
else "$here/train_local.sh" "${options[@]}"; fi
folder=runs/$recipe                             # unless the options have a --run.folder
while [ $# -gt 0 ]; do
    case $1 in
        --run.folder) folder=${2:-$folder} ;;
        --run.folder=*) folder=${1#*=} ;;
    esac
    shift
done
print python -m largebatch.validate "$folder"
exec python -m largebatch.validate "$folder"
