"""Options for a model replica that several ranks share, and the axes along which they cut it.

The ranks of a job are numbered with the last axis fastest:

    data × pipeline × sequence × tensor        1d: tensor;  2d: row, column;  2.5d: depth, row, column;  3d: x, y, z

so the ranks of a replica are neighbours, and the ranks that talk most are the nearest. The size of the data axis is the
number of replicas. All ranks of a replica work on the same batch.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["1d", "2d", "2.5d", "3d"]


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """Tensor parallelism: every matrix is cut over ranks of a replica."""

    mode: Mode = "1d"
    """way to cut: 1d: columns, then rows, over size ranks; 2d: over a square of ranks (SUMMA); 2.5d: over depth
    squares, each with a part of the batch; 3d: over a cube of ranks"""
    size: int = 1
    """ranks of a replica that share each matrix; 1: no tensor parallelism"""
    depth: int = 1
    """number of squares in mode 2.5d; size must be depth × a square"""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Numbers of ranks that share one copy of the model; the copies train in data parallel."""

    pipeline: int = 1
    """number of pipeline stages, each on ranks of its own"""
    schedule: Literal["1f1b", "interleaved", "gpipe"] = "1f1b"
    """order of the forward and backward passes of the stages; interleaved: each rank has two shorter stages, which
    means a smaller bubble and more messages"""
    micro_batches: int | None = None
    """number of parts into which the pipeline cuts a micro-batch (data.micro_batch_size); null: as many as stages"""
    cuts: list[int] | None = None
    """first block of each stage except the first stage, such as [5, 9]; null: equal numbers of blocks"""
    sequence: int = 1
    """ranks that share the tokens of each image (ring attention)"""
    tensor: TensorConfig = field(default_factory=TensorConfig)
    zero: Literal[0, 1, "offload"] = 0
    """1: each data rank keeps and updates one part of the optimizer's state (ZeRO stage 1); offload: so, too, in host
    memory"""

    def shape(self) -> "Shape":
        """Return the axes; ValueError for impossible numbers of ranks."""
        for name, size in (("pipeline", self.pipeline), ("sequence", self.sequence), ("tensor.size", self.tensor.size)):
            if size < 1:
                raise ValueError(f"--parallel.{name} is {size}: expected a number of ranks, 1 or more.")
        return Shape({"pipeline": self.pipeline, "sequence": self.sequence} | _tensor_axes(self.tensor))


def _tensor_axes(tensor: TensorConfig) -> dict[str, int]:
    size, depth = tensor.size, tensor.depth
    if tensor.mode != "2.5d" and depth != 1:
        raise ValueError(f"--parallel.tensor.depth is {depth}, which only mode 2.5d uses: leave it out, or set 2.5d.")
    if tensor.mode == "1d":
        return {"tensor": size}
    if tensor.mode == "3d":
        side = round(size ** (1 / 3))
        if side**3 != size:
            raise ValueError(f"--parallel.tensor.size is {size}: mode 3d expects a cube of ranks, such as 8 or 64.")
        return {"x": side, "y": side, "z": side}
    if depth < 1 or size % depth or math.isqrt(size // depth) ** 2 != size // depth:
        expected = "depth × a square" if tensor.mode == "2.5d" else "a square of ranks"
        raise ValueError(
            f"--parallel.tensor.size is {size}, --parallel.tensor.depth {depth}: mode {tensor.mode} expects "
            f"{expected}, such as {depth * 4} or {depth * 9}."
        )
    side = math.isqrt(size // depth)
    return ({"depth": depth} if tensor.mode == "2.5d" else {}) | {"row": side, "column": side}


@dataclass(frozen=True)
class Shape:
    """Sizes of the axes of one replica by name, the fastest axis last."""

    sizes: dict[str, int]

    @property
    def size(self) -> int:
        """Ranks of one replica."""
        return math.prod(self.sizes.values())

    @property
    def tensor(self) -> tuple[str, ...]:
        """Axes over which every matrix is cut."""
        return tuple(name for name in self.sizes if name not in ("pipeline", "sequence"))

    def data_size(self, num_ranks: int) -> int:
        """Return the number of replicas; ValueError if it is not whole."""
        if num_ranks % self.size:
            raise ValueError(
                f"--parallel asks for replicas of {self.size} ranks ({self}), and the job has {num_ranks}: start a "
                f"multiple of {self.size}, such as {-(-num_ranks // self.size) * self.size}."
            )
        return num_ranks // self.size

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1)


WHOLE = Shape({})  # every rank has the whole model
