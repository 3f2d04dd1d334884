"""Packs images into TFRecord shards: `python -m largebatch.pack`."""

from largebatch.pack.command_line import main, run
from largebatch.pack.packing import PLAN, SHARD_IMAGES, pack
from largebatch.pack.processes import World, mpi_world

__all__ = ["PLAN", "SHARD_IMAGES", "World", "main", "mpi_world", "pack", "run"]
