"""Training images that grow: the phases, the model at other sizes, the images, the plan, and mistakes."""

from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import zoo  # noqa: F401  # lets timm be imported beside torch's CPU build
from largebatch import assembly
from largebatch import config as configs
from largebatch.config import TrainConfig, image_sizes
from largebatch.data.order import Plan
from largebatch.flops import training_flops
from largebatch.plan.run import share_of_work
from largebatch.ranks import Stopped
from largebatch.ranks.single import Single
from largebatch.recipes import choose
from zoo.vit import resampling

CPU = torch.device("cpu")


def config_of(text: str, *given: str) -> TrainConfig:
    argv = ["--model=vit_nano32", "--data=digits", "--recipe=quickstart", f"--schedule.image_sizes={text}", *given]
    return configs.parse(argv, choose_recipe=choose)


# -- the model ---------------------------------------------------------------------------------------------------------

TIMM = dict(img_size=96, patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=5, dynamic_img_size=True)


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"no_embed_class": True}], ids=str)
@pytest.mark.parametrize("side", [32, 64, 96, 128])
def test_logits_and_gradients_of_other_sizes_are_timms(options, side):
    torch.manual_seed(0)
    theirs = VisionTransformer(**TIMM | options)
    ours = zoo.vit.VisionTransformer(**TIMM | options | {"dynamic_img_size": False}, embed_layer=zoo.vit.PatchEmbed)
    ours.load_state_dict(theirs.state_dict())
    ours.take_smaller_images()
    images = torch.randn(3, 3, side, side)
    for training in (True, False):
        outputs = [model.train(training)(images) for model in (ours, theirs)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    gradients = []
    for model in (ours, theirs):
        model.train()(images).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() <= 1e-5 * gradients[1][name].norm(), name


def test_an_evaluation_without_gradients_leaves_training_as_it_was():
    """Lightning evaluates in inference mode, before the first step as well; the matrix is kept."""
    resampling.cache_clear()
    ours = zoo.create_model("vit_nano32", img_size=96, num_classes=5)
    ours.take_smaller_images()
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = ours.eval()(images)
    torch.testing.assert_close(ours(images), expected.clone())
    ours.train()(images).sum().backward()
    halved = ours.eval().to(torch.bfloat16)(images.to(torch.bfloat16))
    torch.testing.assert_close(halved.float(), expected.clone(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("size", [(128, 64), (64, 128), (256, 128)])
def test_images_that_are_not_square_are_timms(size):
    theirs = VisionTransformer(**TIMM)
    ours = zoo.vit.VisionTransformer(**TIMM | {"dynamic_img_size": False}, embed_layer=zoo.vit.PatchEmbed)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, *size)
    for model in (ours, theirs):
        model.set_input_size(img_size=size)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-6)


def test_one_size_keeps_the_bits_and_refuses_others():
    ours = zoo.create_model("vit_nano32", img_size=96, num_classes=5)
    images = torch.randn(2, 3, 96, 96)
    before = ours(images)
    with pytest.raises(AssertionError, match="doesn't match model"):
        ours.eval()(images[..., :64, :64])
    ours.train().take_smaller_images()
    assert torch.equal(before, ours(images))


def test_the_embedding_is_resampled_in_float32_under_autocast():
    ours = zoo.create_model("vit_nano32", img_size=96, num_classes=5)
    ours.take_smaller_images()
    seen: list[Tensor] = []
    ours.pos_drop.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours(torch.zeros(1, 3, 64, 64))
    places = resampling(3, 2, torch.device("cpu")).double() @ ours.pos_embed[0, 1:].double()
    expected = torch.cat([(ours.cls_token + ours.pos_embed[:, :1])[0], places + ours.patch_embed.proj.bias.bfloat16()])
    torch.testing.assert_close(seen[0][0].double(), expected.double(), rtol=0, atol=1e-6)


# -- the images --------------------------------------------------------------------------------------------------------


def batches(text: str, first: int, *given: str) -> list[Any]:
    """The micro-batches of a run on the digits from step `first` on; "": of one size."""
    config = config_of(text, "--run.duration=1000 images", "--data.global_batch_size=96", *given)
    comm = Single()
    images = assembly.open_images(config, comm)
    config = assembly.with_classes(config, images.train)
    model = assembly.build_model(config, CPU, weights=None)
    plan = assembly.build_plan(config, images.train)
    parts = dict(model=model, index=images.train, plan=plan, device=CPU)
    return list(assembly.train_batches(config, comm, first, sizes=assembly.sizes_of(config, plan), **parts))


def test_a_phase_has_the_images_of_a_run_of_its_size():
    """From the beginning, and resumed inside a phase: order, crops and flips are those of one size."""
    small, large = (batches("", 0, f"--model.img_size={side}") for side in (32, 64))
    for first in (0, 2, 7):
        grown = batches("32@0,64@300 images", first)
        expected = [one if one.step < 4 else other for one, other in zip(small, large)]  # 300 images are 3.1 steps
        expected = [batch for batch in expected if batch.step >= first]
        for ours, batch in zip(grown, expected, strict=True):
            assert (ours.step, ours.number) == (batch.step, batch.number)
            assert torch.equal(ours.images, batch.images) and torch.equal(ours.labels, batch.labels)


def test_a_phase_that_begins_at_a_step():
    grown = batches("32@0,64@288 images", 0)  # three steps
    sides = {batch.step: batch.images.shape[-1] for batch in grown}
    assert sides == {step: 32 if step < 3 else 64 for step in range(11)}


# -- phases, plan, mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("32@0,64@30 %", ((0, 32), (300, 64))),
        (" 32@0 , 64 @ 30% ", ((0, 32), (300, 64))),
        ("32@0,64@2 epochs", ((0, 32), (200, 64))),
        ("64@0", ((0, 64),)),
        ("", ((0, 64),)),
    ],
)
def test_phases(text, expected):
    assert image_sizes.phases(config_of(text), num_samples=100, run_images=1000) == expected


def test_the_plan_counts_the_work_of_each_size():
    config = config_of("32@0,64@30 %", "--run.duration=10 epochs")
    share = training_flops("vit_nano32", 32) / training_flops("vit_nano32", 64)
    assert share < 0.5 and share_of_work(config, 100) == pytest.approx(0.3 * share + 0.7)
    assert share_of_work(config_of(""), 100) == 1


@pytest.mark.parametrize(
    "text, given, sentence",
    [
        ("64", [], "is '64': expected phases such as '128@0,192@30 %,224@80 %'."),
        ("32@10 %,64@20 %", [], "its first phase is at 10 %, expected '32@0'."),
        ("32@0,64@soon", [], "'soon' is no number of epochs, images or %."),
        ("32@0,64@3 steps", [], "steps may differ in length, so give its places in epochs, images or %."),
        ("64@0,32@10 %", [], "32 comes after 64, expected a larger size."),
        ("32@0,96@10 %", [], "and --model.img_size 64: expected sizes that end at the image size"),
        ("32@0,64@10 %", ["--parallel.tensor.size=2"], "and --parallel tensor 2: ranks share images of one size"),
    ],
)
def test_mistakes_in_the_text(text, given, sentence):
    with pytest.raises(ValueError) as error:
        config_of(text, *given)
    assert str(error.value).startswith("--schedule.image_sizes is ") and sentence in str(error.value)


@pytest.mark.parametrize(
    "text, given, sentence",
    [
        ("48@0,64@10 %", [], "48 is no multiple of the 32 px of a patch."),
        ("32@0,64@10 %", ["--data.token_labels=true"], "and token labels have one size: leave one of the two out."),
        ("32@0,224@10 %", ["--recipe=volo_d1", "--model=volo_d1", "--img-size=224"], "and volo_d1 has one size: c"),
        ("32@0,64@10 %", ["--model=timm/resnet18"], "and timm/resnet18 has one size: choose a ViT of the zoo, or l"),
    ],
)
def test_sizes_that_the_model_cannot_take(text, given, sentence):
    with pytest.raises(Stopped, match=sentence):
        assembly.check_model(config_of(text, *given), Single())


@pytest.mark.parametrize("text", ["32@0,64@99.9 %", "16@0,32@100 images,64@101 images"])
def test_a_phase_without_a_step_is_one_sentence(text):
    config = config_of(text, "--run.duration=1000 images", "--data.global_batch_size=96")
    with pytest.raises(ValueError, match="no step begins in the phase of (32|64) px, from image [0-9]+ on: move"):
        assembly.sizes_of(config, Plan(1437, 96, 32, 1000, seed=0))


@pytest.mark.parametrize("text", ["32@0,64@100 %", "32@0,64@0 %", "32@0,64@2000 images"])
def test_phases_outside_of_the_run(text):
    with pytest.raises(ValueError, match="the phase of 64 px is to begin at image [0-9]+, the one before it at"):
        image_sizes.phases(config_of(text), num_samples=100, run_images=1000)
