"""Layer-wise decay of the learning rate, beside timm's param_groups_layer_decay, and in a step of each optimizer."""

import copy

import pytest
import torch
from torch import nn

import zoo
from largebatch.config import OptimConfig, ParallelConfig, TrainConfig, check
from largebatch.optim import Lamb, build_optimizer, init_state
from largebatch.parallel.sharded_lamb import ShardedLamb


@pytest.fixture
def alone():
    """A process group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def averaged(model):
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model)


DDP = nn.parallel.DistributedDataParallel
WRAPPERS = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "ddp": DDP,
    "compiled ddp": lambda model: torch.compile(DDP(model), backend="eager"),
    "ddp of a compiled model": lambda model: DDP(torch.compile(model, backend="eager")),
    "data parallel": nn.DataParallel,
    "average of torch": torch.optim.swa_utils.AveragedModel,
    "average of timm": averaged,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["vit_nano32", "timm/convnext_tiny", "timm/swin_tiny_patch4_window7_224"])
def test_a_wrapped_model_has_the_groups_of_the_plain_one(alone, name, wrapper):
    model = zoo.create_model(name, num_classes=3, img_size=64 if "swin" not in name else 224)
    wrapped = WRAPPERS[wrapper](model)
    same = dict(zip(wrapped.parameters(), model.parameters(), strict=True))  # averages are copies
    makers = [getattr(Lamb, preset) for preset in ("paper", "colossal", "nvlamb", "lambc")]
    options = dict(lr=0.1, weight_decay=0.05)
    makers += [lambda m: build_optimizer(m, **options, layer_decay=0.7)]
    makers += [lambda m: build_optimizer(m, **options, name="muon")]
    for make in makers:
        ours, plain = make(wrapped).param_groups, make(model).param_groups
        for one, other in zip(ours, plain, strict=True):
            assert [id(same[p]) for p in one["params"]] == [id(p) for p in other["params"]]
            assert one | {"params": 0} == other | {"params": 0}
        assert len(plain) > 1 or make == Lamb.colossal


def timms(model: nn.Module, **options) -> dict[str, tuple[float, float]]:
    """By name: factor of the learning rate, and weight decay."""
    from timm.optim import param_groups_layer_decay

    groups = param_groups_layer_decay(model, no_weight_decay_list=model.no_weight_decay(), **options)
    return by_name(model, groups)


def by_name(model: nn.Module, groups) -> dict[str, tuple[float, float]]:
    of = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters()}


def test_the_last_norm_is_where_the_factors_are_not_those_of_beit():
    """The rule of BEiT's code, written out: embeddings are layer 0, block i is i + 1, all else is the last layer."""
    with torch.device("meta"):
        model = zoo.create_model("vit_b32")
    found = by_name(model, build_optimizer(model, lr=1.0, weight_decay=0.0, layer_decay=0.5, impl="eager").param_groups)
    for name, (scale, _) in found.items():
        block = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 13
        layer = 0 if name.startswith(("cls_token", "pos_embed", "patch_embed")) else block
        assert scale == (0.5 if name.startswith("norm.") else 0.5 ** (13 - layer)), name


@pytest.mark.parametrize(
    "name, timm_name, layers", [("vit_b32", "vit_base_patch32_224", 14), ("volo_d1", "volo_d1_224", 23)]
)
def test_every_parameter_has_the_factor_of_timm(name, timm_name, layers):
    import timm

    with torch.device("meta"):
        ours, theirs = zoo.create_model(name), timm.create_model(timm_name)
    optimizer = build_optimizer(ours, lr=0.5, weight_decay=0.05, layer_decay=0.75, impl="eager")
    found = by_name(ours, optimizer.param_groups)
    assert found == timms(theirs, weight_decay=0.05, layer_decay=0.75)
    assert {scale for scale, _ in found.values()} == {0.75**k for k in range(layers)}
    assert all(group["lr"] == 0.5 * group["lr_scale"] for group in optimizer.param_groups)


def test_models_of_timm_have_their_factors():
    model = zoo.create_model("timm/test_resnet")
    optimizer = build_optimizer(model, name="sgd", lr=0.5, weight_decay=0.05, layer_decay=0.9)
    model.no_weight_decay = tuple
    assert by_name(model, optimizer.param_groups) == timms(model, weight_decay=0.05, layer_decay=0.9)


@pytest.mark.parametrize("name", ["lamb", "adamw", "nadamw", "schedule_free_adamw", "sgd", "lars"])
def test_a_step_is_that_of_the_learning_rate_of_the_layer(name):
    """Two steps; the reference has an optimizer with the whole rate for each factor, of which this layer takes part."""
    torch.manual_seed(0)
    plain = zoo.create_model("vit_nano32", img_size=32, num_classes=5).double()
    model = copy.deepcopy(plain)
    options = dict(name=name, lr=0.01, weight_decay=0.1) | ({"impl": "plain"} if name == "lamb" else {})
    optimizer = build_optimizer(model, layer_decay=0.5, **options)
    gradients = [[torch.randn_like(p) for p in plain.parameters()] for _ in range(2)]
    step(model, optimizer, gradients)
    scales = {name: scale for name, (scale, _) in by_name(model, optimizer.param_groups).items()}
    for scale in sorted(set(scales.values())):
        reference = copy.deepcopy(plain)
        step(reference, build_optimizer(reference, **(options | {"lr": 0.01 * scale})), gradients)
        for key, parameter in reference.named_parameters():
            if scales[key] == scale:
                assert (dict(model.named_parameters())[key] - parameter).norm() <= 1e-14 * parameter.norm(), key


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[list[torch.Tensor]]) -> None:
    for of_step in gradients:
        for parameter, gradient in zip(model.parameters(), of_step):
            parameter.grad = gradient.clone()
        optimizer.step()


def test_the_factors_survive_horovods_copy_zero_and_a_state_dict():
    """Horovod and ZeRO make a new instance from the groups alone."""
    model = zoo.create_model("vit_nano32", img_size=32)
    optimizer = build_optimizer(model, lr=0.5, weight_decay=0.1, layer_decay=0.75, impl="eager")
    before = [group["lr_scale"] for group in optimizer.param_groups]
    for copied in (type(optimizer)(optimizer.param_groups), ShardedLamb(optimizer.param_groups)):
        assert [group["lr_scale"] for group in copied.param_groups] == before == sorted(before)
    init_state(optimizer)
    again = build_optimizer(model, lr=0.5, weight_decay=0.1, layer_decay=0.75, impl="eager")
    again.load_state_dict(optimizer.state_dict())
    assert [group["lr_scale"] for group in again.param_groups] == before


def test_bad_input_is_one_sentence():
    with pytest.raises(ValueError, match="layer_decay=0.5 needs a model that tells its layers .*; Linear has none"):
        build_optimizer(nn.Linear(2, 2), lr=0.1, weight_decay=0.0, layer_decay=0.5)
    for value in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="--optim.layer_decay is .*: expected a factor above 0 and at most 1, or"):
            check(TrainConfig(optim=OptimConfig(layer_decay=value)))
    with pytest.raises(ValueError, match="--optim.layer_decay is 0.5 and --parallel.pipeline 2: a stage has some"):
        check(TrainConfig(optim=OptimConfig(layer_decay=0.5), parallel=ParallelConfig(pipeline=2)))
