"""Tensor parallelism on real gloo ranks: ViTs cut in one, two, two and a half, three dimensions, against whole ones."""

import copy
import dataclasses
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from gloo import assemble, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from largebatch import losses
from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.optim import build_optimizer, clip_gradients, gradient_norm
from largebatch.parallel import collectives, vit
from largebatch.parallel.cuts import cuts_of, sum_partial_gradients
from largebatch.parallel.loss import classification
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.sharded_lamb import ShardedLamb, global_norm
from largebatch.parallel.state_sharding import Sharding
from largebatch.parallel.tensor import Dropout, DropPath, Linear, layouts, num_blocks, whole
from zoo.vit import STRUCTURES, VisionTransformer

MESHES = {
    "1d-2": TensorConfig(mode="1d", size=2),
    "1d-4": TensorConfig(mode="1d", size=4),
    "2d-4": TensorConfig(mode="2d", size=4),
    "2.5d-8": TensorConfig(mode="2.5d", size=8, depth=2),
    "3d-8": TensorConfig(mode="3d", size=8),
}
SMALL = dict(embed_dim=16, num_heads=4, batch=4)
LARGER = dict(embed_dim=48, num_heads=8, batch=8, global_pool="avg", fused=True, img_size=12)


def make(
    *,
    embed_dim,
    num_heads,
    dtype=torch.float64,
    fused=False,
    global_pool="token",
    img_size=8,
    depth=2,
    kind=VisionTransformer,
    **rates,
):
    """A tiny ViT whose parameters are all random: zeros and ones would hide what is missing."""
    torch.manual_seed(0)
    model = kind(
        img_size=img_size,
        patch_size=4,
        num_classes=12,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        global_pool=global_pool,
        **rates,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model.to(dtype)


def make_batch(model, batch):
    generator = torch.Generator().manual_seed(1)
    side, dtype = model.patch_embed.img_size[0], model.pos_embed.dtype
    images = torch.randn(batch, 3, side, side, generator=generator, dtype=torch.float64)
    targets = torch.rand(batch, 12, generator=generator, dtype=torch.float64)
    return SimpleNamespace(images=images.to(dtype), targets=targets.to(dtype))


def gathered(tensors, cuts, mesh, like):
    """Whole tensors, by the names of the serial model, from this rank's `tensors`, which go in one message."""
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in like.items()}
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors.values()])
    ranks = collectives.all_gather(mine[None], mesh.axis("model"))
    all_parts = ranks.split([tensor.numel() for tensor in tensors.values()], dim=1)
    for name, parts in zip(tensors, all_parts):
        assemble(parts, mesh.places(), cuts[name], whole[name], mesh)
    return whole


def difference(ours, theirs):
    """Largest difference, relative to the largest number of each tensor; NaN counts as infinite."""
    found = [((a - b).abs().max() / b.abs().max()).nan_to_num(torch.inf).item() for a, b in zip(ours, theirs)]
    return max(found)


def train(model, objective, batch, number, optimizer, norm, complete=lambda: None):
    """The loss of each of so many steps."""
    found = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = objective(model, batch)
        (loss / len(batch.images)).backward()
        complete()
        clip_gradients(optimizer, norm(optimizer), 1.0)
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def serial_results(*, batch, number=1, **options):
    """Logits, also of one image fewer, and gradients; then losses, gradients and parameters of so many steps of LAMB.

    Each by its name, as dicts of tensors; `cut_results` has the same of a cut model.
    """
    model = make(**options)
    data = make_batch(model, batch)
    with torch.no_grad():
        found = {"of fewer images": {"": model(data.images[:-1])}}
    logits = model(data.images)
    (logits.square().sum() / batch).backward()
    found["logits"] = {"": logits.detach()}
    found["gradients through logits"] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, lr=0.02, weight_decay=0.1, preset="paper", impl="eager")
    found["loss"] = {"": train(model, losses.classification, data, number, optimizer, gradient_norm)}
    found["gradients"] = {name: parameter.grad for name, parameter in model.named_parameters()}
    found["parameters"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


def cut_results(mesh, *, batch, number=1, **options):
    """The names and the whole tensors of `serial_results`, one after another, of a model that is cut."""
    model = make(**options)
    like = {name: parameter.detach() for name, parameter in model.named_parameters()}
    vit.parallelize(model, mesh)
    data, cuts = make_batch(model, batch), cuts_of(model)
    assert list(cuts) == list(like) == [name for name, _ in model.named_parameters()]

    def gradients():
        return gathered({name: parameter.grad for name, parameter in model.named_parameters()}, cuts, mesh, like)

    logits = model(data.images)
    yield "logits", {"": logits.detach()}
    yield "of fewer images", {"": vit.Predictor(model, model, multiple=batch)(data.images[:-1]).detach()}
    (logits.square().sum() / batch).backward()
    sum_partial_gradients(model, cuts, mesh)
    yield "gradients through logits", gradients()
    groups = build_optimizer(model, lr=0.02, weight_decay=0.1, preset="paper", impl="eager").param_groups
    optimizer = ShardedLamb(groups)
    optimizer.sharding = sharding = Sharding(dict(model.named_parameters()), cuts, mesh)
    loss = train(
        *(model, classification(mesh), data, number, optimizer),
        lambda optimizer: global_norm(optimizer, sharding),
        lambda: sum_partial_gradients(model, cuts, mesh),
    )
    yield "loss", {"": loss}
    yield "gradients", gradients()
    yield "parameters", gathered(dict(model.named_parameters()), cuts, mesh, like)


def differences(mesh, expected, **case):
    """Those of a cut model's results to a serial one's, one after another."""
    for name, found in cut_results(mesh, **case):
        yield name, difference(found.values(), expected[name].values())


def _compare_all(tensor, cases, expected):
    mesh = Mesh(ParallelConfig(tensor=tensor).shape())
    return [dict(differences(mesh, results, **case)) for case, results in zip(cases, expected)]


SINGLE = dict(SMALL, dtype=torch.float32)
DEIT3 = dict(LARGER, global_pool="token", batch=12, fused=False, init_values=1.0, no_embed_class=True)
PLAIN = dict(LARGER, class_token=False, fc_norm=False)
CASES = [dict(SMALL, number=10), LARGER, DEIT3, PLAIN, SINGLE]


@pytest.fixture(scope="module")
def expected():
    """Of each of the cases."""
    return [serial_results(**case) for case in CASES]


@pytest.mark.parametrize("name", MESHES)
def test_a_cut_model_equals_the_serial_one(name, expected):
    for found in on_ranks(_compare_all, MESHES[name].size, MESHES[name], CASES, expected):
        for case, of_case in zip(CASES, found):
            assert len(of_case) == 6
            if case is SINGLE:  # LAMB's first step divides by what may be rounding alone
                del of_case["parameters"]
            limit = 1e-5 if case is SINGLE else 1e-10
            assert max(of_case.values()) < limit, (case, of_case)


# -- what is left out shows -----------------------------------------------------------------------------------------

ALONE = {  # what a rank that talks to nobody would have instead
    "all_reduce": lambda tensor, axis: tensor.clone(),
    "all_reduce_": lambda tensor, axis: None,
    "all_max": lambda tensor, axis: tensor.clone(),
    "all_gather": lambda tensor, axis, dim=0: torch.cat([tensor] * axis.size, dim),
    "reduce_scatter": lambda tensor, axis, dim=0: collectives.own_part(tensor, axis, dim).contiguous(),
    "broadcast": lambda tensor, axis, source: tensor,
    "reduce_to": lambda tensor, axis, target: tensor,
}


OURS = ("collectives", "cuts", "tensor", "loss")  # not the optimizer, which has tests of its own


@contextmanager
def left_out(site, seen):
    """Collectives with what happens at one site, (function, its caller, axis), left out; those used go into `seen`."""

    def replaced(name, original):
        def function(tensor, axis, *arguments):
            caller = sys._getframe(1).f_code
            here = name, caller.co_qualname, axis.name
            if axis.size > 1 and Path(caller.co_filename).stem in OURS:
                seen.add(here)
            return (ALONE[name] if here == site else original)(tensor, axis, *arguments)

        return function

    originals = {name: getattr(collectives, name) for name in ALONE}
    for name, original in originals.items():
        setattr(collectives, name, replaced(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(collectives, name, original)


SHOWS = 1e-4


def _difference_without(site, mesh, expected, seen):
    """The largest, or the first one that shows, as all ranks find it."""
    largest = 0.0
    with left_out(site, seen):
        for _, found in differences(mesh, expected, depth=1, **SMALL):
            largest = max(largest, float(collectives.all_max(torch.tensor(found), mesh.axis("model"))))
            if largest > SHOWS:
                break
    return largest


def _differences_without(tensor, expected):
    mesh, sites = Mesh(ParallelConfig(tensor=tensor).shape()), set()
    found = {"nothing": _difference_without(None, mesh, expected, sites)}
    return found | {site: _difference_without(site, mesh, expected, set()) for site in sorted(sites)}


SITES = {"1d-2": 5, "2d-4": 14, "2.5d-8": 17, "3d-8": 23}  # kinds of calls, by function, caller and axis


@pytest.mark.parametrize("name", ["1d-2", "2d-4", "2.5d-8", "3d-8"])
def test_every_collective_is_missed_when_it_is_left_out(name):
    expected = serial_results(depth=1, **SMALL)
    largest, *others = on_ranks(_differences_without, MESHES[name].size, MESHES[name], expected)
    assert all(other == largest for other in others)
    assert largest.pop("nothing") < 1e-10
    print(*(f"{difference:9.1e}  {' '.join(site)}" for site, difference in largest.items()), sep="\n")
    missed = {site for site, difference in largest.items() if difference > SHOWS}
    assert missed == set(largest)
    assert len(largest) == SITES[name]


# -- no rank holds more than its share ------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest storage, in bytes, that an operation returns, but for those that were there before."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.size, self.operation = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() > self.size and storage.data_ptr() not in self.known:
                    self.size, self.operation = storage.nbytes(), str(func)
        return result


def _largest(tensor, **options):
    """Elements of the largest storage: of a parameter, saved for backward, ever; and ever if fc1's weight is gathered,
    or its output."""
    mesh = Mesh(ParallelConfig(tensor=tensor).shape())
    batch = options.pop("batch")
    model = make(**options)
    data = make_batch(model, batch)
    vit.parallelize(model, mesh)
    kept = max(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    fc1, saved, found = model.blocks[0].mlp.fc1, [], []

    def gather_weight(module, inputs):
        collectives.all_gather(module.weight.detach(), mesh.axis("model"))

    def gather_output(module, inputs, output):
        whole(output.detach(), mesh, layouts(mesh.shape)[1])

    def save(tensor):
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    for register, hook in (
        (None, None),
        (fc1.register_forward_pre_hook, gather_weight),
        (fc1.register_forward_hook, gather_output),
    ):
        handle = register(hook) if register else None
        saving = torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept)
        with Largest(data.images, data.targets) as largest, saving:
            classification(mesh)(model, data).backward()
        found.append(largest.size // 8)
        model.zero_grad()
        if handle:
            handle.remove()
    return kept // 8, max(saved) // 8, *found


def _both_largest(tensor):
    weights = _largest(tensor, embed_dim=64, num_heads=4, batch=4)
    return weights, _largest(tensor, embed_dim=16, num_heads=4, batch=64)


@pytest.mark.parametrize("name, of_weights, of_activations", [("1d-4", 4, 4), ("2d-4", 4, 4), ("2.5d-8", 4, 8)])
def test_no_rank_holds_more_than_its_share(name, of_weights, of_activations):
    """Of the largest weight, that of fc1, and of its output, each where it is larger than the other."""
    for weights, activations in on_ranks(_both_largest, MESHES[name].size, MESHES[name]):
        kept, saved, largest, weight_gathered, _ = weights
        assert kept == saved == largest == 64 * 256 // of_weights < weight_gathered
        _, saved, largest, _, output_gathered = activations
        assert saved == largest == 64 * 5 * 64 // of_activations < output_gathered


def test_three_dimensions_keep_an_eighth_and_hold_a_quarter_at_a_time():
    for weights, activations in on_ranks(_both_largest, 8, MESHES["3d-8"]):
        kept, saved, largest, weight_gathered, _ = weights
        assert kept == saved == 64 * 256 // 8 and largest == 64 * 256 // 4 < weight_gathered
        _, saved, largest, _, output_gathered = activations
        assert saved == 64 * 5 * 64 // 8 and largest == 64 * 5 * 64 // 4 < output_gathered


# -- chance ---------------------------------------------------------------------------------------------------------


def _chances(tensor):
    """Masks put together, of dropout in both layouts and of stochastic depth; and what a model with both does."""
    mesh = Mesh(ParallelConfig(tensor=tensor).shape())
    outer, inner = layouts(mesh.shape)
    torch.manual_seed(5)
    masks = []
    for layout, module in (
        (outer, Dropout(0.25, mesh, outer.axes)),
        (inner, Dropout(0.25, mesh, inner.axes)),
        (outer, DropPath(0.25, mesh, outer.batch)),
    ):
        ones = torch.ones(256 // num_blocks(mesh.shape, layout.batch), 4, 64 // num_blocks(mesh.shape, layout.features))
        masks.append(whole(module(ones), mesh, layout))
    random = collectives.all_gather(torch.rand(1), mesh.axis("model"))
    model = make(
        **{key: SMALL[key] for key in ("embed_dim", "num_heads")},
        **dict.fromkeys(("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"), 0.3),
        fused=True,
    )
    vit.parallelize(model, mesh)
    data, found = make_batch(model, 8), {}
    for seed, again in ((7, False), (7, True), (8, False)):
        torch.manual_seed(seed)
        model.set_grad_checkpointing(again)
        model.zero_grad()
        loss = classification(mesh)(model, data)
        loss.backward()
        found[seed, again] = loss.detach(), model.blocks[0].mlp.fc1.weight.grad
    torch.manual_seed(7)
    dropped = {}

    def record(name):
        def hook(module, inputs, output):
            zero = output == 0
            dropped[name] = (zero.flatten(1).all(1) if "path" in name else zero & (inputs[0] != 0)).numpy().tobytes()

        return hook

    for name, module in model.named_modules():
        if "drop" in name and not isinstance(module, nn.Identity):
            module.register_forward_hook(record(name))
    logits = collectives.all_gather(model(data.images).detach()[None], mesh.axis("model"))
    return masks, random, found, logits, mesh.place, dropped


@pytest.mark.parametrize("name", ["1d-2", "2d-4", "2.5d-8", "3d-8"])
def test_chance_agrees_where_ranks_have_the_same_and_differs_where_they_do_not(name):
    outer, inner = layouts(ParallelConfig(tensor=MESHES[name]).shape())
    sizes = ParallelConfig(tensor=MESHES[name]).shape()
    ranks = on_ranks(_chances, MESHES[name].size, MESHES[name])
    for masks, random, found, logits, place, dropped in ranks:
        assert (random == random[0]).all(), "the default generator is no longer the same on all ranks"
        assert (logits == logits[0]).all()
        for layout, mask in zip((outer, inner), masks):
            blocks = [
                block
                for rows in mask.chunk(num_blocks(sizes, layout.batch))
                for block in rows.chunk(num_blocks(sizes, layout.features), dim=2)
            ]
            for number, block in enumerate(blocks):
                assert block.unique().tolist() == pytest.approx([0, 1 / 0.75])
                assert block.mean().item() == pytest.approx(1, abs=0.03)
                assert not any(torch.equal(block, other) for other in blocks[:number])
        assert (masks[2] == masks[2][:, :1, :1]).all(), "parts of a sample differ in stochastic depth"
        samples = masks[2][:, 0, 0].chunk(num_blocks(sizes, outer.batch))
        assert not any(torch.equal(rows, other) for k, rows in enumerate(samples) for other in samples[:k])
        (loss, grad), (loss_again, grad_again), (other, _) = found.values()
        assert loss == loss_again and torch.equal(grad, grad_again) and loss != other
        assert len(dropped) == 12  # pos_drop, head_drop, four in each block, stochastic depth twice in the second
        for key in dropped:
            axes = outer.batch if "path" in key else inner.axes if key.endswith(("attn_drop", "drop1")) else outer.axes
            for *_, elsewhere, others in ranks:
                if all(place[axis] == elsewhere[axis] for axis in axes):
                    assert others[key] == dropped[key], f"{key} differs at {place} and {elsewhere}"
                elif "path" not in key:
                    assert others[key] != dropped[key], f"{key} is the same at {place} and {elsewhere}"


# -- other references -----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def _beside_dtensor():
    """Output and gradients of an MLP under torch's 1D styles, and under ours: the same parts on the same ranks."""
    mesh = Mesh(ParallelConfig(tensor=TensorConfig(size=4)).shape())
    torch.manual_seed(0)
    theirs = Pair().double()
    ours, x = copy.deepcopy(theirs), torch.randn(6, 5, 16, dtype=torch.float64)
    ours.fc1, ours.fc2 = Linear(ours.fc1, mesh, inwards=True), Linear(ours.fc2, mesh, inwards=False)
    parallelize_module(theirs, init_device_mesh("cpu", (4,)), {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    found = []
    for model in (ours, theirs):
        own = x.clone().requires_grad_()
        y = model(own)
        y.square().sum().backward()
        grads = [getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in model.parameters()]
        found.append([y.detach(), own.grad, *grads])
    return found


def test_one_dimension_equals_torchs_own_styles():
    for ours, theirs in on_ranks(_beside_dtensor, 4):
        assert len(ours) == len(theirs) == 6
        assert difference(ours, theirs) < 1e-12


def _half(tensor):
    mesh = Mesh(ParallelConfig(tensor=tensor).shape())
    serial = make(embed_dim=16, num_heads=4, dtype=torch.float32)
    cut = copy.deepcopy(serial)
    vit.parallelize(cut, mesh)
    images, types = torch.randn(4, 3, 8, 8), set()
    for module in cut.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(lambda module, inputs, output: types.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = cut(images), serial(images)
    ours.float().square().sum().backward()
    grads = {parameter.grad.dtype for parameter in cut.parameters()}
    return difference([ours.float()], [theirs.float()]), types, grads


@pytest.mark.parametrize("name", ["1d-2", "2d-4", "3d-8"])
def test_autocast_reaches_the_products_and_the_gradients_stay_single(name):
    for found, types, grads in on_ranks(_half, MESHES[name].size, MESHES[name]):
        assert found < 0.05 and types == {torch.bfloat16} and grads == {torch.float32}


# -- what cannot be cut ---------------------------------------------------------------------------------------------

B32 = vit.Dimensions(embed_dim=768, num_heads=12, mlp_dim=3072, num_classes=1000, patch_features=3072)
VITS = [
    vit.Dimensions(structure.embed_dim, structure.num_heads, 4 * structure.embed_dim, 1000, 3 * structure.patch_size**2)
    for structure in STRUCTURES.values()
]


@pytest.mark.parametrize(
    "tensor, dimensions, batch, sentence",
    [
        (TensorConfig(size=8), B32, 8, "has 12 attention heads, and tensor 8 cuts them into 8 equal parts"),
        (TensorConfig(size=3), B32, 8, "has 1000 classes, and tensor 3 cuts .*: change --model.num_classes, or --par"),
        (TensorConfig(mode="3d", size=8), B32, 6, "--data.micro_batch_size is 6, and x 2 × y 2 × z 2 .* such as 8"),
        (TensorConfig(mode="2.5d", size=8, depth=2), B32, 2, "cuts each batch into 4: expected a multiple of 4"),
        *[(TensorConfig(mode="3d", size=27), model, 9, "and x 3 × y 3 × z 3 cuts them into") for model in VITS],
        (TensorConfig(mode="2d", size=4), dataclasses.replace(B32, embed_dim=771), 4, "has 771 features"),
        (TensorConfig(size=4), dataclasses.replace(B32, mlp_dim=770), 4, "has 770 features inside its MLPs"),
        (TensorConfig(size=4), dataclasses.replace(B32, patch_features=75), 4, "has 75 numbers per patch"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(tensor, dimensions, batch, sentence):
    shape = ParallelConfig(tensor=tensor).shape()
    with pytest.raises(ValueError, match=sentence):
        vit.check(dimensions, shape, batch)
    for size in (8, 64):  # a mistaken size is told these two
        vit.check(B32, ParallelConfig(tensor=TensorConfig(mode="3d", size=size)).shape(), 16)
