"""Axes and their groups, and what collectives do forward and backward, on real gloo ranks."""

import numpy as np
import pytest
import torch
from gloo import assemble, on_ranks

from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.parallel import collectives
from largebatch.parallel.cuts import Cut, local
from largebatch.parallel.mesh import Mesh

TWO_AND_A_HALF = ParallelConfig(tensor=TensorConfig(mode="2.5d", size=8, depth=2))


def _sums(parallel):
    mesh = Mesh(parallel.shape())
    mine = torch.tensor([10.0 ** int(torch.distributed.get_rank())])
    names = ("data", "model", *mesh.shape.sizes)
    return mesh.place, {name: int(collectives.all_reduce(mine, mesh.axis(name))) for name in names}


def test_every_axis_joins_the_ranks_that_differ_in_it_alone():
    parallel = ParallelConfig(pipeline=2, tensor=TensorConfig(mode="2d", size=4))
    sizes = {"data": 1, "pipeline": 2, "sequence": 1, "row": 2, "column": 2}
    ranks = np.arange(8).reshape(*sizes.values())
    found = on_ranks(_sums, 8, parallel)
    for rank, (place, sums) in enumerate(found):
        where = tuple(place.values())
        assert list(place) == list(sizes) and ranks[where] == rank
        for number, name in enumerate(sizes):
            alike = ranks[where[:number] + (slice(None),) + where[number + 1 :]]
            assert sums[name] == sum(10**other for other in alike), name
        assert sums["model"] == 11111111


def _waits_alone():
    """Rank 0 of each pair waits for rank 1, in a group that torch would let wait for half an hour."""
    axis = Mesh(ParallelConfig(tensor=TensorConfig(size=2)).shape(), limit_s=1).axis("tensor")
    if axis.index == 0:
        with pytest.raises(RuntimeError, match="[Tt]imed out"):
            collectives.all_reduce(torch.ones(1), axis)
    torch.distributed.barrier()


def test_nobody_waits_longer_than_the_limit():
    on_ranks(_waits_alone, 4)


def _cut_and_assembled():
    mesh = Mesh(TWO_AND_A_HALF.shape())
    whole = torch.arange(12.0 * 8).reshape(12, 8)
    cut = Cut({0: ("column",), 1: ("row",)}, pieces=3)
    mine = local(whole, cut, mesh)
    parts = collectives.all_gather(mine[None], mesh.axis("model"))
    again = torch.full_like(whole, torch.nan)
    assemble(parts, mesh.places(), cut, again, mesh)
    return mesh.place, mine, bool((again == whole).all())


def test_a_parameter_is_cut_piece_by_piece_and_put_together_again():
    whole = torch.arange(12.0 * 8).reshape(3, 2, 2, 2, 4)  # pieces, column, within it; row, within it
    for place, mine, same in on_ranks(_cut_and_assembled, 8):
        assert torch.equal(mine, whole[:, place["column"], :, place["row"]].reshape(6, 4)) and same


def _gradients(name):
    """One function between two weighted sums; the loss that all ranks have, and the gradient of this rank's input."""
    axis = Mesh(ParallelConfig(tensor=TensorConfig(size=2)).shape()).axis("tensor")
    function = getattr(collectives, name)
    replicated_in, apart_out = name in ("copy", "split"), name in ("copy", "total", "split")
    torch.manual_seed(0 if replicated_in else axis.index)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    y = function(x, axis, 0) if name in ("gather", "split") else function(x, axis)
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)[: len(y)] + (10 * axis.index if apart_out else 0)
    loss = (weights * y).sum()
    if apart_out:
        loss = collectives.reduce(loss, axis)
    loss.backward()
    xs = collectives.all_gather(x.detach(), axis)
    return xs, loss.item(), x.grad, y.detach()


@pytest.mark.parametrize("name", ["copy", "reduce", "total", "gather", "split"])
def test_gradients_of_collectives(name):
    """Against the same function of all inputs at once, without ranks."""
    found = on_ranks(_gradients, 2, name)
    xs = found[0][0].clone().requires_grad_()
    first, second = (xs[:4], xs[:4]) if name in ("copy", "split") else (xs[:4], xs[4:])
    outputs = {
        "copy": (first, second),
        "reduce": (first + second,),
        "total": (first + second, first + second),
        "gather": (xs,),
        "split": (first[:2], first[2:]),
    }[name]
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)
    loss = sum(((weights[: len(y)] + 10 * index) * y).sum() for index, y in enumerate(outputs))
    loss.backward()
    for index, (_, value, grad, y) in enumerate(found):
        assert value == pytest.approx(loss.item(), rel=1e-14)
        torch.testing.assert_close(y, outputs[min(index, len(outputs) - 1)], rtol=1e-14, atol=1e-14)
        expected = xs.grad[:4] if name in ("copy", "split") else xs.grad[4 * index : 4 * index + 4]
        torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "parallel, ranks, sentence",
    [
        (ParallelConfig(pipeline=0), 4, "--parallel.pipeline is 0: expected a number of ranks"),
        (ParallelConfig(tensor=TensorConfig(mode="2d", size=6)), 6, "expects a square of ranks, such as 4 or 9"),
        (ParallelConfig(tensor=TensorConfig(mode="2.5d", size=8, depth=3)), 8, "depth × a square, such as 12 or 27"),
        (ParallelConfig(tensor=TensorConfig(mode="3d", size=9)), 9, "expects a cube of ranks, such as 8 or 64"),
        (ParallelConfig(tensor=TensorConfig(mode="1d", size=2, depth=2)), 4, "which only mode 2.5d uses"),
        (
            ParallelConfig(pipeline=2, tensor=TensorConfig(size=2)),
            6,
            r"replicas of 4 ranks \(pipeline 2 × tensor 2\), and the job has 6: start a multiple of 4, such as 8",
        ),
    ],
)
def test_impossible_shapes_are_refused_with_the_numbers(parallel, ranks, sentence):
    with pytest.raises(ValueError, match=sentence):
        parallel.shape().data_size(ranks)
