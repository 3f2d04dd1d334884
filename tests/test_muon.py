"""Muon with AdamW or LAMB for the rest: the formulas in float64, a state dict, and Horovod's wrapper."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
from test_optim import relative, set_grads, train
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zoo
from largebatch.optim import Lamb, Muon, build_optimizer, init_state
from largebatch.optim.muon import cost, hidden_matrices, owners

RESTS = ("adamw", "lamb")
CONSTANTS = 3.4445, -4.7750, 2.0315


def model_with_matrices() -> nn.Sequential:
    """Tall, wide and square matrices below the classifier; a convolution and norms beside them."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 2), nn.Flatten(), nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 10), nn.Linear(10, 4)
    return nn.Sequential(*layers, nn.Linear(4, 3)).double()


def orthogonal(u: Tensor, dtype: torch.dtype) -> Tensor:
    """The iteration of Newton and Schulz, in another type than float64 with torch's order of operations."""
    a, b, c = CONSTANTS
    o = u.to(dtype)
    o = o.T if u.shape[0] > u.shape[1] else o
    o = o / o.norm()
    for _ in range(5):
        square = o @ o.T
        o = torch.addmm(o, torch.addmm(square, square, square, beta=b, alpha=c), o, beta=a)
    return o.T if u.shape[0] > u.shape[1] else o


def plain_muon(x: Tensor, grads: list[Tensor], *, rest: str, lr: float, wd: float, momentum: float = 0.95) -> Tensor:
    m, (rows, columns) = torch.zeros_like(x), x.shape
    scale = 0.2 * max(rows, columns) ** 0.5 if rest == "adamw" else max(1, rows / columns) ** 0.5
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g
        x = x - lr * wd * x - lr * scale * orthogonal(u, torch.bfloat16).double()
    return x


@pytest.mark.parametrize("rest", RESTS)
def test_ten_steps_equal_the_formulas(rest):
    """All but the iteration in float64; the rest's tensors are moved as its own optimizer moves them."""
    model, twin = model_with_matrices(), model_with_matrices()
    start, gradients = [p.detach().clone() for p in model.parameters()], []
    impl = {"impl": "plain"} if rest == "lamb" else {}
    optimizer = build_optimizer(model, name="muon", rest=rest, lr=0.02, weight_decay=0.1, **impl)
    alone = build_optimizer(twin, name=rest, lr=0.02, weight_decay=0.1, **impl)
    for step in range(10):
        for one, other in ((model, optimizer), (twin, alone)):
            set_grads(one.parameters(), step)
            other.step()
        gradients.append([p.grad.clone() for p in model.parameters()])
    matrices = {model[index].weight for index in (2, 4, 5)}
    for index, (p, q) in enumerate(zip(model.parameters(), twin.parameters())):
        expected = q
        if p in matrices:
            expected = plain_muon(start[index], [g[index] for g in gradients], rest=rest, lr=0.02, wd=0.1)
        assert relative(p, expected) <= 1e-13


def test_the_iteration_in_bfloat16_is_that_of_float64_to_two_digits():
    """Its singular values are near 1, however different those of the gradient are."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 40), (40, 6), (20, 20)):
        u = torch.randn(*shape, generator=generator, dtype=torch.float64)
        exact = orthogonal(u, torch.float64)
        assert relative(orthogonal(u, torch.bfloat16).double(), exact) <= 0.03
        values = torch.linalg.svdvals(exact)
        assert values.min() > 0.3 and values.max() < 1.3


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_the_bits_are_those_of_torchs_muon(scale, nesterov):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(37, 13), (13, 37), (5, 5), (97, 31), (1, 7), (7, 1)]]
    theirs = copy.deepcopy(ours)
    options = dict(lr=0.03, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale)
    optimizers = Muon([{"params": ours, "kind": "muon", **options}]), torch.optim.Muon(theirs, **options)
    for step in range(5):
        for params, optimizer in zip((ours, theirs), optimizers):
            set_grads(params, step)
            params[2].grad = params[2].grad if step > 1 else None
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


@pytest.mark.parametrize("rest", RESTS)
def test_query_key_and_value_apart_are_as_many_matrices(rest):
    """To the bit those of torch's Muon for each of them; the other weights are as without the option."""

    def build(**options):
        torch.manual_seed(0)
        layers = {"qkv": nn.Linear(6, 18), "kv": nn.Linear(18, 10), "mlp": nn.Linear(10, 8), "head": nn.Linear(8, 3)}
        model = nn.Sequential(OrderedDict(layers))
        impl = {"impl": "plain"} if rest == "lamb" else {}
        return model, build_optimizer(model, name="muon", rest=rest, lr=0.02, weight_decay=0.1, **impl, **options)

    (model, apart), (whole, together) = build(split_qkv=True), build()
    pieces = [nn.Parameter(x.detach().clone()) for x in (*model.qkv.weight.chunk(3), *model.kv.weight.chunk(2))]
    scale = {"adamw": "match_rms_adamw", "lamb": "original"}[rest]
    theirs = torch.optim.Muon(pieces, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=scale)
    for step in range(4):
        for one, optimizer in ((model, apart), (whole, together)):
            set_grads(one.parameters(), step)
            optimizer.step()
        for piece, g in zip(pieces, (*model.qkv.weight.grad.chunk(3), *model.kv.weight.grad.chunk(2))):
            piece.grad = g.clone()
        theirs.step()
    assert torch.equal(model.qkv.weight, torch.cat(pieces[:3])) and torch.equal(model.kv.weight, torch.cat(pieces[3:]))
    same = {name for (name, p), q in zip(model.named_parameters(), whole.parameters()) if torch.equal(p, q)}
    assert same == {name for name, _ in model.named_parameters()} - {"qkv.weight", "kv.weight"}


def test_the_cost_of_a_matrix_is_that_of_its_products():
    for shape in ((6, 40), (40, 6), (20, 20)):
        weight = nn.Parameter(torch.ones(shape))
        weight.grad = torch.ones(shape)
        with FlopCounterMode(display=False) as counter:
            Muon([{"params": [weight], "kind": "muon"}]).step()
        assert counter.get_total_flops() == cost(shape)


@pytest.mark.parametrize("split_qkv", [False, True])
@pytest.mark.parametrize("name", ["vit_b16", "vit_b32", "vit_l32", "volo_d1"])
def test_the_ranks_have_equal_shares_of_the_products(name, split_qkv):
    with torch.device("meta"):
        model = zoo.create_model(name)
    shapes = [x.shape for p, parts in hidden_matrices(model, split_qkv=split_qkv).items() for x in p.chunk(parts)]
    for ranks in (2, 4, 8):
        shares = [0] * ranks
        for shape, rank in zip(shapes, owners(shapes, ranks), strict=True):
            shares[rank] += cost(shape)
        assert max(shares) <= 1.03 * sum(shares) / ranks
    assert sorted(owners([(4, 4), (9, 2)], 5)) == [0, 1], "more ranks than matrices"


def test_the_bits_do_not_depend_on_the_number_of_threads():
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            weight = nn.Parameter(torch.randn(384, 256))
            weight.grad = torch.randn(384, 256)
            Muon([{"params": [weight], "kind": "muon"}]).step()
            found.append(weight.detach())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("name, count", [("vit_b32", 48), ("volo_d1", 86)])
def test_the_classifier_embeddings_and_norms_are_no_matrices(name, count):
    with torch.device("meta"):
        model = zoo.create_model(name)
    matrices = hidden_matrices(model)
    names = {name for name, p in model.named_parameters() if p in matrices}
    assert len(names) == count and all(name.endswith(".weight") for name in names)
    assert not [name for name in names if "head" in name or "embed" in name or "norm" in name.split(".")[-2]]
    groups = build_optimizer(model, name="muon", lr=0.02, weight_decay=0.1).param_groups
    assert [(group["kind"], group["weight_decay"]) for group in groups] == [
        ("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0),
    ]  # fmt: skip
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_layer_decay_reaches_the_groups_of_both():
    with torch.device("meta"):
        model = zoo.create_model("vit_nano32")
    groups = build_optimizer(model, name="muon", lr=0.5, weight_decay=0.1, layer_decay=0.5).param_groups
    assert {group["kind"] for group in groups} == {"muon", "adamw"}
    assert all(group["lr"] == 0.5 * group["lr_scale"] for group in groups)
    assert len({group["lr"] for group in groups if group["kind"] == "muon"}) > 1


@pytest.mark.parametrize("rest", RESTS)
def test_state_dict_round_trip(rest):
    """Through a file read with weights_only: the continued run is bit for bit the uninterrupted one."""

    def build():
        model = model_with_matrices().float()
        options = {"preset": "nvlamb", "impl": "eager"} if rest == "lamb" else {}
        optimizer = build_optimizer(model, name="muon", rest=rest, lr=0.02, weight_decay=0.1, **options)
        init_state(optimizer)
        return model, optimizer

    model, optimizer = build()
    train(optimizer, list(model.parameters()), range(3), clip=0.5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, resumed_optimizer = build()
    for group in resumed_optimizer.param_groups:
        group["impl" if group["kind"] == "lamb" else "unused"] = "plain"
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert {group["impl"] for group in resumed_optimizer.param_groups if group["kind"] == "lamb"} <= {"plain"}
    for group in resumed_optimizer.param_groups:
        if group["kind"] == "lamb":
            group["impl"] = "eager"
    for one, other in ((model, optimizer), (resumed, resumed_optimizer)):
        train(other, list(one.parameters()), range(3, 6), clip=0.5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))


@pytest.mark.parametrize("rest", RESTS)
def test_muon_survives_horovod_and_copies(rest):
    """DistributedOptimizer: an instance of a new subclass, from the group dicts alone, with no state."""
    model, twin = model_with_matrices(), model_with_matrices()
    options = {"betas": (0.8, 0.9), "momentum": 0.7} | ({"preset": "lambc", "impl": "eager"} if rest == "lamb" else {})
    given, direct = (
        build_optimizer(one, name="muon", rest=rest, lr=0.02, weight_decay=0.1, **options) for one in (model, twin)
    )
    before = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in given.param_groups])
    wrapped = type("Muon", (Muon,), {})(given.param_groups)
    assert [{k: v for k, v in group.items() if k != "params"} for group in wrapped.param_groups] == before
    assert {group["momentum"] for group in wrapped.param_groups if group["kind"] == "muon"} == {0.7}
    train(wrapped, list(model.parameters()), range(4), clip=0.5)
    train(direct, list(twin.parameters()), range(4), clip=0.5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    model, optimizer = copy.deepcopy((twin, direct))
    for one, other in ((model, optimizer), (twin, direct)):
        train(other, list(one.parameters()), range(4, 6), clip=0.5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))


@pytest.mark.parametrize("rest", RESTS)
def test_the_initial_state_is_that_of_the_first_step(rest):
    """Frozen parameters have none; a state dict before the first step has zeros, and no step was taken."""
    model = model_with_matrices()
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model, name="muon", rest=rest, lr=0.02, weight_decay=0.1)
    start = copy.deepcopy(model.state_dict())
    created = optimizer.state_dict()["state"]
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    assert len(created) == len(list(model.parameters())) - 1
    twin = model_with_matrices()
    alone = build_optimizer(twin, name="muon", rest=rest, lr=0.02, weight_decay=0.1)
    for one, other in ((model, optimizer), (twin, alone)):
        set_grads(one.parameters(), 0)
        one[0].weight.grad = None
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    assert model[0].weight not in optimizer.state
    assert {key for state in optimizer.state.values() for key in state} == {
        "momentum_buffer", "step", "exp_avg", "exp_avg_sq",
    }  # fmt: skip


def test_lambs_trust_ratios_are_shown():
    model = model_with_matrices()
    optimizer = build_optimizer(model, name="muon", rest="lamb", lr=0.02, weight_decay=0.1, impl="plain")
    assert not optimizer.trust_ratios
    train(optimizer, list(model.parameters()), range(1))
    assert set(optimizer.trust_ratios) == {p for p in model.parameters() if p not in hidden_matrices(model)}
    assert isinstance(optimizer.trust_ratios[model[0].weight], Tensor)
    assert not build_optimizer(model, name="muon", lr=0.02, weight_decay=0.1).trust_ratios


def test_muon_refuses():
    model = model_with_matrices()
    for options, sentence in (
        (dict(rest="sgd"), "rest must be one of adamw, lamb, got 'sgd'"),
        (dict(preset="paper"), "preset='paper' has no effect on muon with adamw for the rest; remove it or choose"),
        (dict(trust_coefficient=0.1), "trust_coefficient=0.1 has no effect on muon with adamw"),
        (dict(split_qkv=True), "split_qkv=True needs a linear layer named qkv or kv, and Sequential has none; rem"),
        (dict(momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build_optimizer(model, name="muon", **({"lr": 0.1, "weight_decay": 0.0} | options))
    with pytest.raises(ValueError, match="rest='lamb' has no effect on adamw; remove it or choose muon"):
        build_optimizer(model, name="adamw", lr=0.1, weight_decay=0.0, rest="lamb")
    with pytest.raises(ValueError, match="split_qkv=True has no effect on lamb; remove it or choose muon"):
        build_optimizer(model, lr=0.1, weight_decay=0.0, split_qkv=True)
    with pytest.raises(ValueError, match="Sequential has no linear layer below its classifier"):
        build_optimizer(nn.Sequential(nn.Linear(2, 2)), name="muon", lr=0.1, weight_decay=0.0)
    with pytest.raises(ValueError, match="must be one of muon, adamw, lamb, got None"):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))]}])
    assert issubclass(Muon, torch.optim.Optimizer) and not issubclass(Muon, Lamb)
