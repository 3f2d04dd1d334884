"""The average of the weights: its memory in images, what it does to buffers, and half-lives that are refused."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from largebatch import assembly, validate
from largebatch.config import OptimConfig, TrainConfig
from largebatch.data.order import Plan
from largebatch.hooks.ema import Ema, check_half_life, lerp_, share


def test_the_memory_is_counted_in_images():
    """One step or many, what is left of the beginning is the same; after a half-life it is half."""
    assert share(1000, half_life_images=1000) == pytest.approx(0.5, rel=1e-15)
    for sizes in ([3000], [1000] * 3, [2990, 10], [1] * 3000):
        left = math.prod(1 - share(images, half_life_images=4321) for images in sizes)
        assert left == pytest.approx(0.5 ** (3000 / 4321), rel=1e-12)
    assert share(1, half_life_images=10**12) == pytest.approx(math.log(2) / 1e12, rel=1e-9)  # 1 - 0.5^... has 4 digits


class Net(nn.Module):
    """A weight under two names, and buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("share", torch.ones(2, dtype=torch.bfloat16), persistent=False)


def test_what_is_averaged_and_what_is_copied():
    model = Net()
    ema = Ema(model, half_life_images=10)
    assert ema.model.second.weight is ema.model.first.weight is not model.first.weight
    old = model.first.weight.detach().clone()
    with torch.no_grad():
        model.first.weight.add_(1.0)
        model.norm.running_mean.fill_(4.0)
        model.norm.num_batches_tracked.fill_(7)
        model.share.fill_(3.0)
    trainer = SimpleNamespace(model=model)
    ema.after_train_step(trainer, SimpleNamespace(applied=False, images=10))
    assert torch.equal(ema.model.first.weight, old)
    ema.after_train_step(trainer, SimpleNamespace(applied=True, images=10))
    torch.testing.assert_close(ema.model.first.weight, old + 0.5)  # once, though it has two names
    assert ema.model.norm.running_mean.tolist() == [2.0, 2.0] and int(ema.model.norm.num_batches_tracked) == 7
    assert ema.model.share.tolist() == [2.0, 2.0]
    lerp_(ema.model, model, 1.0)
    assert torch.equal(ema.model.first.weight, model.first.weight) and ema.model.first.weight.grad_fn is None


def test_a_resumed_average_is_not_begun_anew():
    model = nn.Linear(2, 2)
    ema = Ema(nn.Linear(2, 2), half_life_images=10)
    before = ema.model.weight.clone()
    ema.before_fit(SimpleNamespace(model=model, state=SimpleNamespace(step=3)))
    assert torch.equal(ema.model.weight, before)
    ema.before_fit(SimpleNamespace(model=model, state=SimpleNamespace(step=0)))
    assert torch.equal(ema.model.weight, model.weight)


def test_a_half_life_that_is_too_long():
    run, epoch = 300 * 1_281_167, 1_281_167
    longest = math.floor(run / math.log2(100))
    check_half_life(longest, run_images=run, epoch_images=epoch)
    with pytest.raises(ValueError, match=f"the longest that fits is {longest} images .45.15 epochs.."):
        check_half_life(longest + 10, run_images=run, epoch_images=epoch)
    with pytest.raises(ValueError) as caught:
        check_half_life(100 * epoch, run_images=run, epoch_images=epoch)
    assert "--optim.ema_half_life is 100 epochs: at the end of the run, after 300 epochs" in str(caught.value)
    assert "would still be 12.5 % of the average, expected at most 1 %" in str(caught.value)


def test_the_option(tmp_path):
    plan = Plan(num_samples=100, global_batch_size=16, micro_batch_size=8, num_images=1000, seed=0)

    def average(text: str) -> Ema | None:
        return assembly.build_average(TrainConfig(optim=OptimConfig(ema_half_life=text)), plan, nn.Linear(2, 2))

    assert average("") is None
    assert average("10 %").half_life_images == average("1 epoch").half_life_images == 100
    for text, sentence in (
        ("20 %", "--optim.ema_half_life is 2 epochs: .* the longest that fits is 150 images"),
        ("soon", "optim.ema_half_life is 'soon': expected a number and a unit"),
        ("0 epochs", "--optim.ema_half_life is '0 epochs': expected more than nothing"),
    ):
        with pytest.raises(ValueError, match=sentence):
            average(text)


def test_validation_of_an_average_that_is_not_there(tmp_path):
    (tmp_path / "config.yaml").write_text("recipe: quickstart\n")
    with pytest.raises(ValueError, match="was trained without --optim.ema_half_life"):
        validate.read([str(tmp_path), "--ema"])
    with pytest.raises(ValueError, match="--ema and --init-from both choose weights"):
        validate.read(["--ema", "--model", "vit_b32", "--init-from", "x.safetensors"])
