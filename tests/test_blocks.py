"""Blocks that are compiled one by one: the gradients of the plain model, and one graph for equal blocks.

tests/mpi/ranks/test_compile.py compiles them to kernels, and sees that their gradients are reduced meanwhile.
"""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from largebatch import compiling
from largebatch.augment import Augmented
from largebatch.batch_norm import BatchNormStatistics
from largebatch.config import RunConfig, TrainConfig, apply
from largebatch.losses import TokenLabeling, classification
from largebatch.precision import autocast
from largebatch.ranks.single import Single
from zoo import blocks, volo
from zoo.blocks import compile_blocks
from zoo.vit import VisionTransformer

CPU = torch.device("cpu")
CLASSES = 7
VOLO = "--model volo_d1 --img-size 32 --data.micro_batch_size 4 --run.precision bf16 --loss.dense_weight 0.5"
VIT = "--model vit_nano32 --img-size 8 --data.micro_batch_size 4 --run.precision bf16"
BOUND = 1e-12  # of ||difference|| / ||gradient|| in float64


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    counters.clear()
    blocks.compiled.cache_clear()
    yield
    blocks.compiled.cache_clear()


@pytest.fixture
def without_kernels(monkeypatch):
    """The graphs of torch.compile, computed by torch's own operations: a kernel takes seconds to compile."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def tiny_vit(*, depth: int = 6, **rates: float) -> nn.Module:
    """For images (B, 3, 8, 8)."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=depth, num_heads=2, num_classes=CLASSES, **rates
    )


def tiny_volo(*, depths: tuple[int, ...] = (2, 1, 1, 1), **rates: float) -> nn.Module:
    """Two outlookers and three blocks, for images (B, 3, 32, 32)."""
    torch.manual_seed(0)
    structure = replace(volo.STRUCTURES["volo_d1"], depths=depths, dims=(16, 32), heads=(1, 2), stem_dim=8)
    return volo.VOLO(structure, img_size=32, num_classes=CLASSES, **rates)


def said(caplog) -> list[str]:
    """Our own lines: torch's compiler has its own."""
    return [record.getMessage() for record in caplog.records if record.name == compiling.__name__]


def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    if hasattr(model, "forward_train"):
        token, cells = model.forward_train(images)
        (token.square().sum() + cells.square().sum()).backward()
    else:
        model(images).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("make, side, most", [(tiny_vit, 8, 4), (tiny_volo, 32, 7)], ids=["vit", "volo"])
def test_gradients_with_stochastic_depth_are_those_of_the_plain_model(make, side, most):
    """Its draws are the same, and every block has a rate of its own. With recomputation, too."""
    plain, ours = (make(drop_path_rate=0.5).double() for _ in range(2))
    assert compile_blocks(ours) == (6 if make is tiny_vit else 5)
    images = torch.randn(4, 3, side, side, dtype=torch.float64)
    expected = gradients(plain, images)
    assert distance(gradients(ours, images), expected) <= BOUND
    assert 0 < graphs() <= most
    ours.set_grad_checkpointing()
    assert distance(gradients(ours, images), expected) <= BOUND
    assert graphs() <= most
    assert list(ours.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(copy.deepcopy(ours).state_dict(), strict=True)


@pytest.mark.usefixtures("without_kernels")
def test_twelve_equal_blocks_are_compiled_once():
    plain, ours = (tiny_vit(depth=12).double() for _ in range(2))
    assert compile_blocks(ours) == 12
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert distance(gradients(ours, images), gradients(plain, images)) <= BOUND
    assert graphs() == 1
    assert torch.equal(copy.deepcopy(ours)(images), plain(images)) and graphs() == 1  # a copy is a plain model


def test_a_layer_that_attends_in_cpp_stays_as_it_is():
    model = tiny_volo()
    (native,), (other,) = model.network[2], model.network[3]
    native.attn.native = lambda qkv, scale: qkv
    compile_blocks(model)
    assert native.attend is volo.attend and native.feed is not volo.feed
    assert other.attend is not volo.attend and other.feed is native.feed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_without_blocks_runs_as_it_is(caplog, rank):
    model = nn.Linear(2, 2)
    config = TrainConfig(run=RunConfig(compile="blocks"))
    compiling.compile_model(config, model, classification, CPU, SimpleNamespace(rank=rank, size=2))
    warning = "--run.compile blocks is not used: only a ViT or a VOLO has blocks that it can compile"
    assert said(caplog) == [warning] * (rank == 0)
    assert model._compiled_call_impl is None


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("wanted", [True, "blocks"])
@pytest.mark.parametrize("make", [tiny_vit, tiny_volo])
def test_a_trial_leaves_a_model_as_it_was_and_its_graphs_are_those_of_training(monkeypatch, caplog, make, wanted):
    """Batch norm's statistics, gradients and draws are those from before; a step adds no graph."""
    monkeypatch.setattr(compiling, "can_compile", lambda device_type: True)
    config = apply(TrainConfig(), VOLO.split() if make is tiny_volo else VIT.split())
    config = replace(config, run=replace(config.run, compile=wanted))
    model = make() if make is tiny_volo else make(drop_path_rate=0.5, proj_drop_rate=0.5)
    objective = TokenLabeling(0.5) if make is tiny_volo else classification
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    compiling.compile_model(config, model, objective, CPU, Single())
    assert said(caplog) == [] and graphs() > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled, side = graphs(), config.model.img_size
    batch = Augmented(torch.randn(4, 3, side, side), torch.rand(4, CLASSES), mix_box=(0, 0, 1, 1))
    with BatchNormStatistics(model, Single()).over_steps(), autocast(CPU, "bf16"):
        objective(model, batch).backward()
    assert graphs() == compiled


@pytest.mark.usefixtures("without_kernels")
def test_an_objective_that_fails_is_no_end(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "can_compile", lambda device_type: True)

    def fails(model: nn.Module, batch: Augmented) -> Tensor:
        raise MemoryError

    config = apply(TrainConfig(), ["--run.compile", "blocks", "--run.precision", "fp32"])
    compiling.compile_model(config, model := tiny_vit(), fails, CPU, Single())
    (line,) = said(caplog)
    assert "rank 0 cannot compute a compiled pass (MemoryError); all ranks compute without it" in line
    assert all(block._compiled_call_impl is None for block in model.blocks)
