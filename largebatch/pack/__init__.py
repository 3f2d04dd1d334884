"""Packs images into TFRecord shards: `python -m largebatch.pack`.

    command_line   chooses the sub-command: packing itself, check or token-labels
    packing        images -> shards, shared among processes and restartable
    inputs         the sources that can be packed: folders, tars, CIFAR-10, TFRecords, the built-in ones
    check          lists the images that cannot be decoded
    token_labels   adds a teacher's label maps to TFRecords
    output         the folder of shards: its plan, by which an interrupted command goes on
    processes      the MPI processes that share the work
    progress       a bar on a terminal, lines in a log
"""

from largebatch.pack.command_line import main, run
from largebatch.pack.packing import PLAN, SHARD_IMAGES, pack
from largebatch.pack.processes import World, mpi_world

__all__ = ["PLAN", "SHARD_IMAGES", "World", "main", "mpi_world", "pack", "run"]
