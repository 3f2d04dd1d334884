"""Tensor parallelism on real gloo ranks: ViTs cut in one, two, two and a half, three dimensions, against whole ones."""

import copy
from types import SimpleNamespace

import pytest
import torch
from gloo import on_ranks

from largebatch import losses
from largebatch.parallel import collectives, vit
from largebatch.parallel.loss import classification
from largebatch.parallel.mesh import Mesh
from largebatch.parallel.shape import ParallelConfig, TensorConfig
from largebatch.parallel.sharding import assemble, cuts_of, sum_partial_gradients
from zoo.vit import VisionTransformer

MESHES = {
    "1d-2": TensorConfig(mode="1d", size=2),
    "1d-4": TensorConfig(mode="1d", size=4),
    "2d-4": TensorConfig(mode="2d", size=4),
    "2.5d-8": TensorConfig(mode="2.5d", size=8, depth=2),
    "3d-8": TensorConfig(mode="3d", size=8),
}
SMALL = dict(embed_dim=16, num_heads=4, batch=4)
LARGER = dict(embed_dim=48, num_heads=8, batch=8, global_pool="avg", fused=True, img_size=12)


def make(*, embed_dim, num_heads, dtype=torch.float64, fused=False, global_pool="token", img_size=8, **options):
    """A tiny ViT whose parameters are all random: zeros and ones would hide what is missing."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=img_size,
        patch_size=4,
        num_classes=12,
        embed_dim=embed_dim,
        depth=2,
        num_heads=num_heads,
        global_pool=global_pool,
        **options,
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


def gathered(tensors, model, cuts, mesh, like):
    """Whole tensors, by the names of the serial model, from this rank's `tensors`."""
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in like.items()}
    for name, tensor in tensors.items():
        all_parts = collectives.all_gather(tensor.detach()[None], mesh.axis("model"))
        assemble(all_parts, mesh.places(), cuts[name], whole[name], mesh)
    return whole


def difference(ours, theirs):
    """Largest difference, relative to the largest number of each tensor; NaN counts as infinite."""
    found = [((a - b).abs().max() / b.abs().max()).nan_to_num(torch.inf).item() for a, b in zip(ours, theirs)]
    return max(found)


def steps(model, objective, batch, number, after=lambda: None):
    """The loss of each of so many steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    found = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = objective(model, batch)
        (loss / len(batch.images)).backward()
        after()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def compare(mesh, *, batch, number=1, **options):
    """Differences of logits, loss, gradients and parameters after so many steps, between cut and serial model."""
    serial = make(**options)
    cut = copy.deepcopy(serial)
    vit.parallelize(cut, mesh)
    data, cuts = make_batch(serial, batch), cuts_of(cut)
    logits = cut(data.images)
    found = {"logits": difference([logits], [serial(data.images)])}
    (logits.square().sum() / batch).backward()
    sum_partial_gradients(cut, cuts, mesh)
    (serial(data.images).square().sum() / batch).backward()
    found["gradients through logits"] = _gradients(cut, cuts, mesh, serial)
    ours = steps(cut, classification(mesh), data, number, lambda: sum_partial_gradients(cut, cuts, mesh))
    found["loss"] = difference([ours], [steps(serial, losses.classification, data, number)])
    found["gradients"] = _gradients(cut, cuts, mesh, serial)
    like = dict(serial.named_parameters())
    whole = gathered(dict(cut.named_parameters()), cut, cuts, mesh, like)
    assert list(whole) == list(cuts) == list(like)
    found["parameters"] = difference(whole.values(), like.values())
    return found


def _gradients(cut, cuts, mesh, serial):
    like = {name: parameter.grad for name, parameter in serial.named_parameters()}
    ours = {name: parameter.grad for name, parameter in cut.named_parameters()}
    return difference(gathered(ours, cut, cuts, mesh, like).values(), like.values())


def _compare_all(tensor, cases):
    mesh = Mesh(ParallelConfig(tensor=tensor).shape())
    return [compare(mesh, **case) for case in cases]


@pytest.mark.parametrize("name", MESHES)
def test_a_cut_model_equals_the_serial_one(name):
    single = dict(SMALL, dtype=torch.float32)
    cases = [dict(SMALL, number=10), LARGER, dict(LARGER, global_pool="token", batch=12, fused=False), single]
    for found in on_ranks(_compare_all, MESHES[name].size, MESHES[name], cases):
        for case, differences in zip(cases, found):
            limit = 1e-5 if case is single else 1e-10
            assert max(differences.values()) < limit, (case, differences)
