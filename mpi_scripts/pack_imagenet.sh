#!/usr/bin/env bash
# What:     packs ImageNet into TFRecord shards with an index, from the downloaded tars of ILSVRC2012 (train, val,
#           devkit_t12) or from folders train/<class>/* and val/<class>/*. The processes share the shards among them.
# Hardware: CPU cores, and disk space for a second copy: ImageNet-1K's files are 154 GB.
# Time:     a core decodes a few hundred images per second, each image once; not yet measured on all 1.3 million.
# Prints:   the command, a bar per split, and the number of images and shards.
#
# Usage:    mpi_scripts/pack_imagenet.sh SOURCE TFRECORD_FOLDER [options of largebatch.pack]
# After an interruption, the same command continues.
#
# Variables, all optional: RANKS (default: one process per core), and those of env.sh

set -euo pipefail
# shellcheck source=mpi_scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[ $# -ge 2 ] || fail "give the folder of ImageNet's tars or images, then the folder for the shards"
command=("${MPIRUN[@]}" -np "${RANKS:-$(nproc)}" "$VENV/bin/python" -m largebatch.pack "$@")
print "${command[@]}"
exec "${command[@]}"
