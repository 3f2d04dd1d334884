"""Input: where the images lie (records, sources), in which order (order), how they become tensors (dali)."""
