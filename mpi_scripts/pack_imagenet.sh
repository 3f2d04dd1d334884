#!/usr/bin/env bash
# What:     packs ImageNet into TFRecord shards with an index: ILSVRC2012's tars (train, val, devkit_t12) as they were
#           downloaded, or folders train/<class>/* and val/<class>/*. Processes share out the shards.
# Hardware: CPU cores, and disk space for a second copy: ImageNet-1K's files are 145 GB.
# Time:     each image is decoded once, a core does some hundred per second; not yet measured on all 1.3 million.
# Prints:   the command, a bar per split, and the number of images and shards.
#
# Usage:    mpi_scripts/pack_imagenet.sh SOURCE TFRECORD_FOLDER [options of largebatch.pack]
# The same command goes on where it was interrupted.
#
# Variables, all optional: RANKS (default: one process per core), and those of env.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[ $# -ge 2 ] || fail "give the folder of ImageNet's tars or images, then the folder for the shards"
command=("${MPIRUN[@]}" -np "${RANKS:-$(nproc)}" "$VENV/bin/python" -m largebatch.pack "$@")
print "${command[@]}"
exec "${command[@]}"
