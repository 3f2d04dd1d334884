"""Packs images into TFRecord shards."""

from largebatch.pack.packing import (
    LOCAL_SIZES,
    PLAN,
    SHARD_IMAGES,
    Progress,
    World,
    main,
    pack,
    processes,
)

__all__ = [
    "LOCAL_SIZES",
    "PLAN",
    "Progress",
    "SHARD_IMAGES",
    "World",
    "main",
    "pack",
    "processes",
]
