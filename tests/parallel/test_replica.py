"""A replica that ranks share, as the engine calls it, against the whole model; on real gloo ranks."""

import copy

import pytest
import torch
from gloo import on_ranks

from largebatch.augment import Augmented
from largebatch.config.parallel import ParallelConfig, TensorConfig
from largebatch.losses import classification
from largebatch.parallel.cuts import local
from largebatch.parallel.replica import ParallelReplica
from zoo.vit import VisionTransformer

MESHES = {
    "pipeline": ParallelConfig(pipeline=2),
    "2d": ParallelConfig(tensor=TensorConfig(mode="2d", size=4)),
}


def build():
    torch.manual_seed(1)
    model = VisionTransformer(img_size=8, patch_size=4, num_classes=12, embed_dim=16, depth=2, num_heads=4).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch(size):
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(size, 3, 8, 8, dtype=torch.float64, generator=generator)
    return Augmented(images, torch.rand(size, 12, dtype=torch.float64, generator=generator).softmax(dim=1))


def _passes(config, sizes):
    """Losses, logits and the largest difference of gradients, of batches of these sizes."""
    model = build()
    whole = copy.deepcopy(model)
    replica = ParallelReplica(
        config,
        model,
        batch_size=4,
        precision="fp32",
        make_optimizer=lambda model: torch.optim.SGD(model.parameters()),
    )
    objective = replica.adapt_objective(classification)
    replica.check_objective(objective)
    with pytest.raises(ValueError, match="trainer.objective was set, and --parallel.pipeline and --parallel.tensor"):
        replica.check_objective(lambda model, batch: model(batch.images).sum())

    def forward_backward(batch, weight):
        loss = objective(model, batch) * weight
        loss.backward()
        return loss.detach()

    found = []
    for size in sizes:
        loss = replica.run_pass(batch(size), 1 / size, forward_backward)
        replica.complete_gradients()
        (classification(whole, batch(size)) / size).backward()
        differences = []
        for name, parameter in model.named_parameters():
            expected = local(whole.get_parameter(name).grad, replica.cuts[name], replica.mesh).view_as(parameter)
            differences.append(float((parameter.grad - expected).abs().max()))
        found.append((float(loss), replica.predictor(model)(batch(size).images).detach(), max(differences)))
        for one in (model, whole):
            one.zero_grad()
    return found


@pytest.mark.parametrize("name", MESHES)
def test_a_short_batch_is_filled_up_with_images_that_count_for_nothing(name):
    """Of 1 and 3 images, where the mesh needs an even number: loss, logits and gradients are those of the images."""
    sizes, config = (1, 3, 4), MESHES[name]
    whole = build()
    for found in on_ranks(_passes, config.shape().size, config, sizes):
        for size, (loss, logits, difference) in zip(sizes, found, strict=True):
            assert loss == pytest.approx(classification(whole, batch(size)).item() / size, rel=1e-12)
            torch.testing.assert_close(logits, whole(batch(size).images).detach(), rtol=1e-12, atol=1e-12)
            assert difference < 1e-12
