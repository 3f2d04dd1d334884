#!/usr/bin/env bash
# What:     measures the GPUs of this host: the doctor, the tests of GPUs, optimizers, models, the loader, whole steps and
#           their memory beside the plan's, and on two or more GPUs scaling. Each part has a time limit. A part that has
#           passed is not repeated: start it again after an interruption.
# Hardware: one NVIDIA GPU or more, idle, with 40 GB each for VOLO-D5; with SMOKE=1 two CPU cores.
# Time:     aims at 30 minutes on one GPU, and ends after 87 at the latest, with two or more GPUs after 107; its parts
#           were tried on an H200, except loader and memory, and the whole was not. With SMOKE=1 5 to 10 minutes.
# Prints:   a line per part, with its seconds; at the end the table that OUTPUT/README.md has.
# Writes:   OUTPUT/PART/log.txt, and the CSV and PNG of each benchmark beside it
#
# Usage:    mpi_scripts/measure_gpu.sh [PART ...]      (default: all, in the order of --list)
#
# Variables, all optional: OUTPUT (default: runs/gpu), SMOKE=1 (tiny sizes on a CPU: tries the script itself), and those
#   of env.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

output=${OUTPUT:-runs/gpu} found=$(gpus)
[ -n "${SMOKE:-}" ] || [ "$found" -gt 0 ] || fail "there is no GPU here (nvidia-smi -L names none): SMOKE=1 tries the script on a CPU"
mkdir -p "$output"
output=$(cd "$output" && pwd)
cd "$ROOT"

names=()
declare -A limits commands
part() { names+=("$1"); limits[$1]=$2; shift 2; commands[${names[-1]}]=$(printf '%q ' "$@"); }  # NAME SECONDS COMMAND...

benchmark=(python -m largebatch.benchmark)
vits=(vit_b32 vit_b16 vit_l32) volos=(volo_d1 volo_d5)
sizes=(--rounds 10) few=(--rounds 10 --batch-size 64) step=(--rounds 10) loader=(--rounds 3)
ranks=$found images=256 micro=(--data.micro_batch_size 256) bind=(mpi_scripts/bind.sh) shared=()
if [ -n "${SMOKE:-}" ]; then
    ranks=2 images=4 micro=() bind=() shared=(--model vit_s16 --img-size 64 --batch-size 4 --rounds 1)
    vits=(vit_ti16) volos=()
    sizes=(--rounds 2 --img-size 64 --batch-size 2) few=("${sizes[@]}")
    loader=(--rounds 1 --data digits --img-size 32 --batch-size 4 --images 16 --num-threads 1)
    step=(--rounds 2 --data.micro_batch_size 2 --data.global_batch_size 4 --model.img_size 64)
fi

part doctor 120 python -m largebatch.doctor
part tests 300 python -m pytest -q -n 4 tests/gpu
for model in "${vits[@]}"; do
    part "optimizer-$model" 120 "${benchmark[@]}" optimizer --model "$model"
done
for model in "${vits[@]}" "${volos[@]}"; do
    part "model-$model" 120 "${benchmark[@]}" model --model "$model" "${sizes[@]}" --variants eager blocks --vs timm
done
for model in "${vits[@]}"; do
    part "compiled-$model" 300 "${benchmark[@]}" model --model "$model" "${sizes[@]}" --variants blocks --vs timm-compiled
done
# Few images, as when hundreds of ranks share a global batch. A part for each way, because a model that is compiled as a
# whole takes minutes.
for way in blocks compiled graphs; do
    part "few-$way" 300 "${benchmark[@]}" model --model "${vits[0]}" "${few[@]}" --variants "$way" eager --vs timm
done
part few-timm 300 "${benchmark[@]}" model --model "${vits[0]}" "${few[@]}" --variants eager --vs timm timm-compiled
part loader 240 "${benchmark[@]}" loader "${loader[@]}"
for model in "${vits[@]}" "${volos[@]}"; do
    part "step-$model" 120 "${benchmark[@]}" step --data resident --model "$model" "${step[@]}"
done
# The plan's memory is beside that of each step: above with micro-batches of 32, here with larger ones.
for model in "${vits[@]}" "${volos[@]}"; do
    case $model in volo*) large=64 ;; *) large=$images ;; esac
    part "memory-$model" 60 "${benchmark[@]}" step --vs none --rounds 1 --data resident --model "$model" \
        "${step[@]:2}" --data.micro_batch_size "$large" --data.global_batch_size $((2 * large))
done
if [ "$ranks" -gt 1 ]; then
    part scaling 600 env OUTPUT="$output/scaling" IMAGES="$images" mpi_scripts/scaling.sh --data resident "${step[@]}" "${micro[@]}"
    part scaling-torch 300 torchrun --nproc-per-node "$ranks" -m largebatch.benchmark step --vs none --data resident \
        "${step[@]}" "${micro[@]}" --data.global_batch_size $((ranks * images))
    part parallel 300 "${MPIRUN[@]}" -np "$ranks" "${bind[@]}" "${benchmark[@]}" parallel "${shared[@]}"
fi

case ${1:-} in --list) printf '%s\n' "${names[@]}"; exit ;; esac
failed=()
for name in "${@:-${names[@]}}"; do
    [ -n "${limits[$name]:-}" ] || fail "there is no part '$name': --list prints them"
    folder=$output/$name
    [ ! -e "$folder/passed" ] || { echo "$name: passed before"; continue; }
    mkdir -p "$folder"
    eval "command=(${commands[$name]})"
    case " ${command[*]} " in *" largebatch.benchmark "*) command+=(--output "$folder") ;; esac
    print "${command[@]}" >"$folder/log.txt"
    began=$SECONDS status=0
    timeout -k 10 "${limits[$name]}" "${command[@]}" >>"$folder/log.txt" 2>&1 || status=$?
    case $status in
        0) echo "$name: $((SECONDS - began)) s"; touch "$folder/passed" ;;
        124 | 137) echo "$name: not ready after ${limits[$name]} s, see $folder/log.txt"; failed+=("$name") ;;
        *) echo "$name: exit code $status after $((SECONDS - began)) s, see $folder/log.txt"; failed+=("$name") ;;
    esac
done
[ -z "$(find "$output" -name '*.csv' -print -quit)" ] ||
    python -m largebatch.benchmark page "$output" --output "$output"
[ ${#failed[@]} -eq 0 ] || fail "these parts did not pass: ${failed[*]}"
