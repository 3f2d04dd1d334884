"""LAMB on parts of tensors and pieces of its state, against LAMB of whole tensors in one process, on gloo ranks."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from gloo import assemble, on_ranks
from torch import nn

from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.optim import build_optimizer, clip_gradients, follow_half_life, gradient_norm, init_state
from largebatch.parallel import collectives
from largebatch.parallel.cuts import UNCUT, Cut, local
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.sharded_lamb import ShardedLamb, global_norm
from largebatch.parallel.state_sharding import Sharding, state_bytes

STEPS = 10
SHAPES = {  # every cut dimension is a multiple of 4; the sum is odd
    "embed": (8, 6),
    "shift": (8,),
    "qkv": (12, 5),
    "one": (1,),
    "zero_dim": (),
    "rare": (3, 3),
    "proj": (7, 8),
    "norm": (7,),
    "late": (4, 4),
    "head": (4, 9),
}
CUTS_1D = {
    "embed": Cut({0: ("tensor",)}),
    "shift": Cut({0: ("tensor",)}),
    "qkv": Cut({0: ("tensor",)}, pieces=3),
    "proj": Cut({1: ("tensor",)}),
    "head": Cut({0: ("tensor",)}),
}
CUTS_2D = {
    "embed": Cut({0: ("row", "column")}),
    "shift": Cut({0: ("column",)}),
    "qkv": Cut({0: ("row",)}, pieces=3),
    "proj": Cut({1: ("row",)}),
    "head": Cut({0: ("column",)}),
    "late": Cut({0: ("row",), 1: ("column",)}),
}
MESHES = {  # ranks, axes, cuts
    "tensor 2": (2, ParallelConfig(tensor=TensorConfig(size=2)), CUTS_1D),
    "tensor 4": (4, ParallelConfig(tensor=TensorConfig(size=4)), CUTS_1D),
    "row 2 x column 2": (4, ParallelConfig(tensor=TensorConfig(mode="2d", size=4)), CUTS_2D),
    "pipeline 2": (2, ParallelConfig(pipeline=2), {}),
    "pipeline 2 x tensor 2": (4, ParallelConfig(pipeline=2, tensor=TensorConfig(size=2)), CUTS_1D),
    "data 2 x tensor 2, zero": (4, ParallelConfig(tensor=TensorConfig(size=2), zero=1), CUTS_1D),
    "data 2 x pipeline 2, zero": (4, ParallelConfig(pipeline=2, zero=1), {}),
    "data 3, zero": (3, ParallelConfig(zero=1), {}),
    "data 3, zero, offload": (3, ParallelConfig(zero="offload"), {}),
    "sequence 2": (2, ParallelConfig(sequence=2), {}),
}
PRESETS = ("paper", "colossal", "nvlamb", "lambc", "corrected")


class Parameters(nn.Module):
    """Random ones, of some names alone."""

    def __init__(self, whole):
        super().__init__()
        for name, tensor in whole.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def whole_parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def set_gradients(model, step, part_of=lambda name, whole: whole):
    """Those of a step, large or small; "rare" has one every third step, "late" from the fourth on."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, shape in SHAPES.items():
        whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 ** (step % 4 - 2)
        missing = name == "rare" and step % 3 or name == "late" and step < 4
        if (p := getattr(model, name, None)) is not None:
            p.grad = None if missing else part_of(name, whole)


def build(model, preset):
    impl = {"nvlamb": "auto", "colossal": "plain"}.get(preset, "eager")
    optimizer = build_optimizer(model, lr=0.02, weight_decay=0.1, preset=preset, impl=impl)
    if preset == "lambc":
        for group in optimizer.param_groups:
            group["norm_range"] = (2.5, 3.0)
    if preset == "paper":
        for group in optimizer.param_groups:
            group["half_life"] = 60
    return optimizer


def grow(optimizer, step):
    """Set beta2 for a batch that grows by an image in each step."""
    for group in optimizer.param_groups:
        follow_half_life(group, 8 + step, before=sum(8 + earlier for earlier in range(step)))


def reference(preset, clip, steps=range(STEPS)):
    """(model, optimizer, norms of the gradients) after some steps in one process."""
    model = Parameters(whole_parameters())
    optimizer, norms = build(model, preset), []
    for step in steps:
        set_gradients(model, step)
        grow(optimizer, step)
        norms.append(gradient_norm(optimizer))
        clip_gradients(optimizer, norms[-1], clip)
        optimizer.step()
    return model, optimizer, torch.stack(norms)


class Rank:
    """A rank's parts of the parameters, and their optimizer."""

    def __init__(self, parallel, cuts, preset, whole=None):
        self.mesh = Mesh(parallel.shape())
        self.cuts = {name: cuts.get(name, UNCUT) for name in SHAPES}
        stage, stages = self.mesh.axis("pipeline").index, self.mesh.axis("pipeline").size
        names = [name for number, name in enumerate(SHAPES) if number * stages // len(SHAPES) == stage]
        self.model = Parameters({name: self.part(name, (whole or whole_parameters())[name]) for name in names})
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = ShardedLamb(build(self.model, preset).param_groups)
        self.optimizer.sharding = self.sharding = Sharding(
            self.parameters, self.cuts, self.mesh, zero=bool(parallel.zero), offload=parallel.zero == "offload"
        )

    def part(self, name, whole):
        return local(whole, self.cuts[name], self.mesh)

    def steps(self, steps, clip):
        norms = []
        for step in steps:
            set_gradients(self.model, step, self.part)
            grow(self.optimizer, step)
            norms.append(global_norm(self.optimizer, self.sharding))
            clip_gradients(self.optimizer, norms[-1], clip)
            self.optimizer.step()
        return torch.stack(norms)

    def whole(self, name, part):
        """Put together over this replica."""
        found = part.new_empty(SHAPES[name])
        parts = collectives.all_gather(part[None], self.mesh.axis("model"))
        assemble(parts, self.mesh.places(), self.cuts[name], found.view(-1) if found.ndim == 0 else found, self.mesh)
        return found


def difference(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


CASES = [(preset, clip) for preset in PRESETS for clip in (None, 1.0)]


@pytest.fixture(scope="module")
def expected():
    """Of each case the norms, and of each parameter itself, its state and its trust ratio, if it has one."""
    return {case: _expected(*case) for case in CASES}


def _expected(preset, clip):
    model, optimizer, norms = reference(preset, clip)
    ratios = optimizer.trust_ratios
    parameters = {
        name: {"": p.detach(), **optimizer.state[p]} | ({"ratio": ratios[p]} if p in ratios else {})
        for name, p in model.named_parameters()
    }
    return norms, parameters


def _errors(parallel, cuts, expected):
    """Largest difference to the reference, relative, of everything, for all presets, with and without a clip."""
    collectives.BUCKET_BYTES = 8 * 50  # several in a step
    errors = {}
    for case, (expected_norms, expected_parameters) in expected.items():
        rank = Rank(parallel, cuts, case[0])
        norms = rank.steps(range(STEPS), case[1])
        errors[*case, "norm"] = difference(norms, expected_norms)
        assert len(rank.optimizer.trust_ratios) == len(rank.parameters)  # all have a gradient in the last step
        for name, p in rank.parameters.items():
            whole, state = expected_parameters[name], rank.optimizer.state_of(p)
            assert state["step"] == whole["step"], name
            if "ratio" in whole:
                errors[*case, name, "ratio"] = difference(rank.optimizer.trust_ratios[p], whole["ratio"])
            for key, part in {"": p.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
                errors[*case, name, key] = difference(part, rank.part(name, whole[key]))
    return errors


@pytest.mark.parametrize("name", MESHES)
def test_ten_steps_are_those_of_whole_tensors(name, expected):
    ranks, parallel, cuts = MESHES[name]
    for rank, errors in enumerate(on_ranks(_errors, ranks, parallel, cuts, expected)):
        assert len(errors) > 8 * 5
        worst = max(errors, key=errors.get)
        assert errors[worst] <= 1e-12, f"rank {rank}: {worst} differs by {errors[worst]:.1e}"


@contextmanager
def counted(calls):
    """Lists the numbers of elements of each all-reduce."""
    real = dist.all_reduce

    def counting(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return real(tensor, *arguments, **options)

    dist.all_reduce = counting
    yield
    dist.all_reduce = real


def _sums(parallel, cuts):
    rank = Rank(parallel, cuts, "paper")
    set_gradients(rank.model, 0, rank.part)
    in_norm, in_step = [], []
    with counted(in_norm):
        clip_gradients(rank.optimizer, global_norm(rank.optimizer, rank.sharding), 1.0)
    with counted(in_step):
        rank.optimizer.step()
    return in_norm, in_step


@pytest.mark.parametrize("name", ["pipeline 2 x tensor 2", "data 2 x tensor 2, zero"])
def test_a_step_sums_once_over_ranks_and_the_norm_of_gradients_once_more(name):
    ranks, parallel, cuts = MESHES[name]
    assert on_ranks(_sums, ranks, parallel, cuts) == [([1], [2 * len(SHAPES)])] * ranks


def _first_half(parallel, cuts, preset):
    """Five steps; every parameter and its state, whole, and whether a state set is the state that there was."""
    rank = Rank(parallel, cuts, preset)
    rank.steps(range(5), 1.0)
    found, same = {}, []
    for name, p in rank.parameters.items():
        state, pieces = rank.optimizer.state_of(p), dict(rank.optimizer.state[p])
        rank.optimizer.set_state_of(p, {})
        assert rank.optimizer.state_of(p) == {}
        rank.optimizer.set_state_of(p, state)
        same += [torch.equal(*map(torch.as_tensor, (pieces[key], rank.optimizer.state[p][key]))) for key in pieces]
        moments = {key: rank.whole(name, state[key]) for key in ("exp_avg", "exp_avg_sq")}
        found[name] = rank.whole(name, p.detach()), {"step": state["step"]} | moments
    return found, same


def _second_half(parallel, cuts, preset, found):
    rank = Rank(parallel, cuts, preset, {name: whole for name, (whole, _) in found.items()})
    for name, p in rank.parameters.items():
        state = found[name][1]
        moments = {key: rank.part(name, state[key]) for key in ("exp_avg", "exp_avg_sq")}
        rank.optimizer.set_state_of(p, {"step": state["step"]} | moments)
    rank.steps(range(5, STEPS), 1.0)
    model, _, _ = reference(preset, 1.0)
    return {name: difference(p, rank.part(name, getattr(model, name))) for name, p in rank.parameters.items()}


@pytest.mark.parametrize(
    "first, second",
    [
        ("data 2 x tensor 2, zero", "data 2 x pipeline 2, zero"),
        ("tensor 2", "data 3, zero, offload"),
        ("data 3, zero", "tensor 4"),
    ],
)
def test_a_run_goes_on_in_another_mesh(first, second):
    ranks, parallel, cuts = MESHES[first]
    halves = on_ranks(_first_half, ranks, parallel, cuts, "colossal")
    assert all(same for _, every in halves for same in every)
    ranks, parallel, cuts = MESHES[second]
    for errors in on_ranks(_second_half, ranks, parallel, cuts, "colossal", halves[0][0]):
        assert errors and max(errors.values()) <= 1e-12, errors


def _state_bytes(parallel, cuts):
    rank = Rank(parallel, cuts, "paper")
    init_state(rank.optimizer)
    lengths = [sum(piece.length for piece in pieces) for pieces in rank.sharding.pieces]
    return state_bytes(rank.optimizer), lengths


def test_each_data_rank_keeps_its_part_of_the_state():
    ranks, parallel, cuts = MESHES["data 3, zero"]
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found = on_ranks(_state_bytes, ranks, parallel, cuts)
    lengths = found[0][1]
    assert sum(lengths) == numel and max(lengths) - min(lengths) == 1
    assert [used for used, _ in found] == [2 * 8 * length for length in lengths]


def _adamw(parallel, cuts):
    rank = Rank(parallel, cuts, "paper")
    groups = [{"params": list(rank.parameters.values())}]
    rank.optimizer = ShardedLamb(groups, lr=0.02, weight_decay=0.1, adapt=False, eps=1e-8)
    rank.optimizer.sharding = rank.sharding
    rank.steps(range(STEPS), None)
    model = Parameters(whole_parameters())
    adamw = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        set_gradients(model, step)
        adamw.step()
    return {name: difference(p, rank.part(name, getattr(model, name))) for name, p in rank.parameters.items()}


def test_without_adaptation_it_is_adamw():
    ranks, parallel, cuts = MESHES["data 3, zero"]
    for errors in on_ranks(_adamw, ranks, parallel, cuts):
        assert max(errors.values()) <= 1e-12, errors


def _mistakes():
    mesh = Mesh(ParallelConfig(zero=1).shape())
    model = Parameters(whole_parameters())
    parameters, cuts = dict(model.named_parameters()), dict.fromkeys(SHAPES, UNCUT)
    optimizer = ShardedLamb(model.parameters())
    with pytest.raises(ValueError, match="does not know its mesh: set its sharding, after comm.wrap"):
        optimizer.step()
    with pytest.raises(ValueError, match="set --parallel.zero 1 as well"):
        Sharding(parameters, cuts, mesh, offload=True)
    optimizer.sharding = Sharding({"one": model.one}, cuts, mesh)
    with pytest.raises(ValueError, match=r"of shape \(8, 6\) is not among those"):
        optimizer.init_param(model.embed)
    mixed = parameters | {"norm": nn.Parameter(torch.zeros(7))}
    with pytest.raises(ValueError, match="expects parameters of one type on one device"):
        Sharding(mixed, cuts, mesh, zero=True)


def test_mistakes_are_told():
    on_ranks(_mistakes, 1)
