"""VOLO under one-dimensional tensor parallelism, on real gloo ranks, against the whole model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from gloo import on_ranks
from test_tensor import difference, gathered

from largebatch import losses
from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.parallel import volo
from largebatch.parallel.cuts import cuts_of
from largebatch.parallel.mesh import Mesh
from zoo.volo import STRUCTURES, VOLO, Structure

TINY = Structure((1, 1, 1, 1), (16, 32), (4, 8), mlp_ratio=3.0, stem_dim=8, timm_name="")


def make(**rates):
    torch.manual_seed(0)
    model = VOLO(TINY, img_size=48, num_classes=12, **rates).double()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_batch():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(6, 3, 48, 48, generator=generator, dtype=torch.float64)
    targets, tokens = (torch.rand(6, *n, 12, generator=generator, dtype=torch.float64) for n in ((), (9,)))
    return SimpleNamespace(images=images, targets=targets, token_targets=tokens, mix_box=(0, 1, 2, 3))


def _compare(size, fused, again, parts):
    mesh = Mesh(ParallelConfig(tensor=TensorConfig(size=size)).shape())
    serial = make(drop_path_rate=0.5)
    for block in (*serial.network[2], *serial.network[3], *serial.network[4]):
        block.attn.fused_attn = fused
    cut = copy.deepcopy(serial)
    volo.parallelize(cut, mesh)
    batch, cuts = make_batch(), cuts_of(cut)
    values = []
    for model in (cut, serial):
        torch.manual_seed(3)
        model.set_grad_checkpointing(again)
        objective = losses.TokenLabeling(dense_weight=0.5)
        if model is cut and parts:
            objective = volo.token_labeling(mesh, dense_weight=0.5)
        loss = objective(model, batch)
        (loss / 6).backward()
        of_images = objective(model.eval(), SimpleNamespace(**{**vars(batch), "token_targets": None}))
        values.append([loss.detach(), *model.buffers(), model(batch.images), of_images])
    like = {name: parameter.grad for name, parameter in serial.named_parameters()}
    ours = gathered({name: parameter.grad for name, parameter in cut.named_parameters()}, cuts, mesh, like)
    assert list(cuts) == list(like)
    matrices = {name for name, parameter in serial.named_parameters() if parameter.ndim == 2}
    assert matrices <= {name for name, cut in cuts.items() if cut.axes()}
    return difference(*values), difference(ours.values(), like.values())


@pytest.mark.parametrize("size, fused, again, parts", [(2, False, False, False), (4, True, True, True)])
def test_a_cut_volo_equals_the_whole_one(size, fused, again, parts):
    for values, grads in on_ranks(_compare, size, size, fused, again, parts):
        assert values < 1e-10 and grads < 1e-10


def test_what_volo_cannot_be_is_refused():
    with torch.device("meta"):
        model = VOLO(STRUCTURES["volo_d1"], img_size=224, num_classes=1000)
    for tensor, sentence in (
        (TensorConfig(mode="2d", size=4), "set mode 1d, the only one that VOLO has"),
        (TensorConfig(mode="3d", size=8), r"cuts images and features \(x 2 × y 2 × z 2\)"),
        (TensorConfig(size=4), "has 6 attention heads, and tensor 4 cuts them"),
        (TensorConfig(size=3), "has 1000 classes, and tensor 3 cuts them"),
    ):
        with pytest.raises(ValueError, match=sentence):
            volo.check(model, ParallelConfig(tensor=tensor).shape())
    volo.check(model, ParallelConfig(tensor=TensorConfig(size=2)).shape())
