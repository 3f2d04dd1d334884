"""Checkpoints that a kill, a full disk or a bad block cannot take away."""

from largebatch.checkpoint.mirror import Mirror
from largebatch.checkpoint.resume import MAY_DIFFER, check_config, load, may_differ, resume
from largebatch.checkpoint.snapshot import HostMemory, Snapshot, num_bytes, take_snapshot
from largebatch.checkpoint.store import (
    check_space,
    checkpoints,
    discard_after,
    find_weights,
    is_checkpoint,
    latest,
    newest_weights,
    read_state,
    save,
    why_invalid,
)

__all__ = [
    "MAY_DIFFER", "HostMemory", "Mirror", "Snapshot", "check_config", "check_space", "checkpoints",
    "discard_after", "find_weights", "is_checkpoint", "latest", "load", "may_differ", "newest_weights", "num_bytes",
    "read_state", "resume", "save", "take_snapshot", "why_invalid",
]  # fmt: skip
