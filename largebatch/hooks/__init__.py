"""What watches a run. The order in which they run stands in `build`."""

from largebatch.hooks.log import (
    PLAIN_LINES,
    REDRAW_S,
    Checkpoint,
    Csv,
    Curves,
    Guards,
    Log,
    Progress,
    Sink,
    TensorBoard,
    Throughput,
    trust_ratios,
)

__all__ = [
    "Checkpoint",
    "Csv",
    "Curves",
    "Guards",
    "Log",
    "PLAIN_LINES",
    "Progress",
    "REDRAW_S",
    "Sink",
    "TensorBoard",
    "Throughput",
    "trust_ratios",
]
