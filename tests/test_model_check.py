"""A model that cannot be is refused before images are opened, with the option as it is typed."""

import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from largebatch import assembly
from largebatch.config import ModelConfig, TrainConfig
from largebatch.config.parallel import ParallelConfig
from largebatch.data.order import Plan
from zoo import create_model

COMM = SimpleNamespace(rank=0, together=lambda phase: nullcontext())


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"img_size": 225}, "^--model.img_size 225 does not fit vit_b32: expected a multiple .* 224 or 256.$"),
        ({"name": "volo_d1", "global_pool": "avg"}, "^--model.global_pool of volo_d1 is 'avg', and volo_d1 has no use"),
        ({"name": "vit_b_32"}, "^There is no model 'vit_b_32': did you mean vit_b32.* the zoo has .*, and timm/NAME.$"),
        ({"name": "timm/resnt18"}, "^There is no model 'timm/resnt18': did you mean timm/resnet18 "),
        ({"name": "timm/test_vit", "img_size": 100}, "^--model.img_size 100 does not fit timm/test_vit: "),
        ({"weights": "nowhere.pt"}, "^--init-from is nowhere.pt: there is no such file or folder.$"),
    ],
)
def test_a_model_that_cannot_be(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        assembly.check_model(TrainConfig(model=ModelConfig(**options)), COMM)


def test_weights_that_cannot_be_read():
    config = TrainConfig(model=ModelConfig(name="vit_nano32", weights=__file__))
    with pytest.raises(ValueError, match=f"^--init-from is {__file__}: {__file__} is not known as a weights file"):
        assembly.build_model(config, torch.device("cpu"), weights=__file__)


@pytest.mark.parametrize("theirs", ["timm/test_resnet", "timm/test_vit"])
def test_weights_of_another_model_of_timm_name_the_option_that_takes_them(tmp_path, theirs):
    file = str(tmp_path / "theirs.pt")
    torch.save(create_model(theirs, num_classes=10).state_dict(), file)
    config = TrainConfig(model=ModelConfig(name="vit_nano32", weights=file, num_classes=10))
    with pytest.raises(ValueError, match="does not fit vit_nano32: .*; for weights .* timm give --model timm/NAME.$"):
        assembly.build_model(config, torch.device("cpu"), weights=file)
    named = replace(config, model=replace(config.model, name=theirs))
    assembly.build_model(named, torch.device("cpu"), weights=file)


def test_what_is_missing_from_weights_of_this_model_names_no_other(tmp_path):
    file = str(tmp_path / "part.pt")
    part = create_model("vit_nano32", num_classes=10).state_dict()
    del part["norm.weight"]
    torch.save(part, file)
    config = TrainConfig(model=ModelConfig(name="vit_nano32", weights=file, num_classes=10))
    with pytest.raises(ValueError, match="does not fit vit_nano32: missing norm.weight.$"):
        assembly.build_model(config, torch.device("cpu"), weights=file)


@pytest.mark.parametrize(
    "batch, repeats, parallel, sentence",
    [
        (8, 1, ParallelConfig(), ""),
        (8, 3, ParallelConfig(), "with --augment.repeats 3 micro-batches share images"),
        (4, 1, ParallelConfig(), "a step is a single micro-batch of 4 images; --data.micro_batch_size 2, or a smaller"),
        (8, 1, ParallelConfig(sequence=2), "with --parallel .*sequence.* no rank has the gradient of a whole model"),
    ],
)
def test_the_noise_scale_is_left_out_with_a_sentence(batch, repeats, parallel, sentence, caplog):
    caplog.set_level(logging.INFO)
    plan = Plan(num_samples=9, global_batch_size=batch, micro_batch_size=4, num_images=90, seed=0, repeats=repeats)
    assert (assembly.build_noise_scale(TrainConfig(parallel=parallel), plan) is None) is bool(sentence)
    assert re.search(f"^{sentence and 'no gradient noise scale: '}{sentence}", caplog.messages[0] if sentence else "")


@pytest.mark.parametrize(
    "name, img_size",
    [
        *(("timm/resnet18", 32), ("timm/resnet18", 64), ("timm/levit_128s", 224), ("timm/test_resnet", 32)),
        ("vit_nano32", 32),
    ],
)
def test_a_micro_batch_of_one_image_is_refused_where_torch_would(name, img_size):
    """Before the first step, with an option that helps."""
    model = create_model(name, img_size=img_size, num_classes=10).train()
    try:
        model(torch.zeros(1, 3, img_size, img_size))
        fails = False
    except ValueError as error:
        assert "Expected more than 1 value per channel" in str(error)
        fails = True
    assert fails is ((name, img_size) not in {("timm/resnet18", 64), ("vit_nano32", 32)})
    config = TrainConfig(model=ModelConfig(name=name, img_size=img_size, num_classes=10))
    for size, images, lone, remedy in (
        (4, 25, "the last", "--run.duration '24 images'"),
        (4, 1, "the last", "--run.duration '2 images'"),
        (1, 24, "every", "--data.micro_batch_size 2"),
        (4, 24, "", ""),
        (4, 26, "", ""),
        (2, 24, "", ""),
    ):
        plan = Plan(num_samples=9, global_batch_size=8, micro_batch_size=size, num_images=images, seed=0)
        sees = f"In this run {lone} micro-batch has one image, of which the batch norm .* of {name} at {img_size} px"
        refused = fails and lone
        with pytest.raises(ValueError, match=f"{sees} .* set {remedy}.$") if refused else nullcontext():
            assembly.refuse_lone_image(config, plan)


def test_batch_norm_over_few_images_is_warned_of(caplog):
    caplog.set_level(logging.WARNING)
    assembly.warn_of_few_statistics(create_model("vit_nano32", img_size=32), 1)
    assembly.warn_of_few_statistics(create_model("timm/test_resnet"), 16)
    assert not caplog.text
    assembly.warn_of_few_statistics(create_model("timm/test_resnet"), 8)
    assert "--data.micro_batch_size is 8, and the model has batch norm" in caplog.text
