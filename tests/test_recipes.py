"""The recipes against the published settings, written down here a second time."""

import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from largebatch import assembly, validate
from largebatch.config import ModelConfig, TrainConfig, accumulation_passes, check, dump
from largebatch.data import order, randaugment
from largebatch.data.order import Plan
from largebatch.optim import clip_gradients, gradient_norm
from largebatch.parallel.replica import check as check_replica
from largebatch.recipes import RECIPES, choose

ROOT = Path(__file__).parents[1]
IMAGENET = 1_281_167
VOLO_224 = [f"volo_d{number}" for number in range(1, 6)]
# global batch, micro-batch, peak lr, stochastic depth, img_size, lowest lr, warm-up and all epochs
VOLO = {
    "volo_d1": (1024, 128, 1.6e-3, 0.1, 224, 1e-5, 20, 310),
    "volo_d2": (1024, 128, 1.0e-3, 0.2, 224, 1e-5, 20, 310),
    "volo_d3": (1024, 128, 1.0e-3, 0.5, 224, 1e-5, 20, 310),
    "volo_d4": (1024, 128, 1.0e-3, 0.5, 224, 1e-5, 20, 310),
    "volo_d5": (1024, 128, 8.0e-4, 0.75, 224, 1e-5, 20, 310),
    "volo_d5_as_run": (352, 44, 1.0e-4, 0.75, 224, 1e-5, 20, 310),
    "volo_d1_384": (512, 64, 8e-6, 0.1, 384, 4e-6, 5, 40),
    "volo_d2_384": (384, 48, 8e-6, 0.2, 384, 4e-6, 5, 40),
    "volo_d3_448": (240, 30, 8e-6, 0.5, 448, 4e-6, 5, 40),
    "volo_d4_448": (240, 30, 8e-6, 0.5, 448, 4e-6, 5, 40),
    "volo_d5_448": (32, 4, 2.3e-5, 0.5, 448, 1e-5, 5, 40),
    "volo_d5_512": (32, 4, 2.3e-5, 0.5, 512, 1e-5, 5, 40),
}


def learning_rates(config: TrainConfig) -> list[float]:
    """The rate in the middle of each epoch of ImageNet."""
    batch = config.data.global_batch_size
    epochs = int(config.run.duration.split()[0])
    length = order.epoch_images(IMAGENET, config.augment.repeats, batch)
    size = {"global_batch_size": batch, "micro_batch_size": config.data.micro_batch_size, "num_images": epochs * length}
    plan = Plan(IMAGENET, **size, seed=0, repeats=config.augment.repeats)
    schedule = assembly.build_schedule(config, plan)
    peak = assembly.peak_lr(config)
    return [peak * schedule(round((epoch + 0.5) * length / batch)) for epoch in range(epochs)]


@pytest.mark.parametrize("name", VOLO)
def test_a_published_volo(name):
    batch, micro, peak, drop_path, img_size, lowest, warmup, epochs = VOLO[name]
    config = RECIPES[name]()
    check(config)
    assert (config.data.global_batch_size, config.data.micro_batch_size) == (batch, micro)
    assert (config.model.img_size, config.model.drop_path_rate) == (img_size, drop_path)
    decay = epochs - 10  # and ten at the lowest rate; the cosine runs from epoch 0, hidden by the warm-up
    expected = [1e-6 + epoch / warmup * (peak - 1e-6) for epoch in range(warmup)]
    expected += [
        lowest + 0.5 * (peak - lowest) * (1 + math.cos(math.pi * epoch / decay)) for epoch in range(warmup, decay)
    ]
    expected += [lowest] * 10
    assert learning_rates(config) == pytest.approx(expected, rel=1e-9)
    assert config.optim.weight_decay == (0.05 if img_size == 224 else 1e-8)
    assert config.loss.ground_truth == ("none" if img_size == 224 else "published")
    assert (config.loss.dense_weight, config.mixes_tokens) == (0.5, True)


# global batch, optimizer, peak lr, decay, clip, img_size, stochastic depth, mixup, cutmix, epochs, model
SMALL_BATCH = {
    "deit3_s16": (2048, "lamb", 4e-3, 0.05, 1, 224, 0.05, 0.8, 1, 800, "deit3_s16"),
    "deit3_b16": (2048, "lamb", 3e-3, 0.05, 1, 192, 0.2, 0.8, 1, 800, "deit3_b16"),
    "deit3_l16": (2048, "lamb", 3e-3, 0.05, 1, 192, 0.45, 0.8, 1, 800, "deit3_l16"),
    "deit3_b16_224": (512, "adamw", 1e-5, 0.1, None, 224, 0.2, 0.8, 1, 20, "deit3_b16"),
    "deit3_l16_224": (512, "adamw", 1e-5, 0.1, None, 224, 0.45, 0.8, 1, 20, "deit3_l16"),
    "plain_s16_like": (1024, "adamw", 1e-3, 0.1, 1, 224, 0, 0.2, 0, 90, "plain_s16"),
    "plain_b16_like": (1024, "adamw", 1e-3, 0.1, 1, 224, 0, 0.2, 0, 90, "plain_b16"),
    "augreg_b16_like": (4096, "adamw", 1e-3, 0.1, 1, 224, 0, 0.5, 0, 300, "vit_b16"),
    "augreg_b32_like": (4096, "adamw", 1e-3, 0.1, 1, 224, 0, 0.5, 0, 300, "vit_b32"),
}


@pytest.mark.parametrize("name", SMALL_BATCH)
def test_a_recipe_of_the_field(name):
    config = RECIPES[name]()
    check(config)
    data, model, augment, optim = config.data, config.model, config.augment, config.optim
    settings = (optim.name, assembly.peak_lr(config), optim.weight_decay, optim.clip_norm)
    mixing = (model.drop_path_rate, augment.mixup_alpha, augment.cutmix_alpha, int(config.run.duration.split()[0]))
    assert (data.global_batch_size, *settings, model.img_size, *mixing, model.name) == SMALL_BATCH[name]
    assert config.recipe == name and augment.label_smoothing == (0.1 if "_224" in name else 0)
    deit = name.startswith("deit3")
    with torch.device("meta"):
        geometry = assembly.model_geometry(data, zoo.create_model(model.name, img_size=model.img_size))
    mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if deit else ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert geometry == ((1.0, "bicubic", mean, std) if deit else (0.875, "bilinear", mean, std))
    assert (data.scale, augment.reprob) == ((0.08, 1.0) if deit else (0.05, 1.0), 0)
    assert (config.loss.name, augment.repeats) == (("bce", 3) if deit and "_224" not in name else ("cross_entropy", 1))
    # RandAugment: that of DeiT's fine-tuning; 2 operations of magnitude 10, or 15 (medium2), which are always applied
    policies = {"deit3": "rand-m9-mstd0.5-inc1", "plain": "tf-m10-n2", "augreg": "tf-m15-n2"}
    assert augment.auto_augment == ("3a" if augment.repeats == 3 else policies[name.partition("_")[0]])
    if not deit:
        drawn = randaugment.draw(randaugment.parse(augment.auto_augment), 0, np.zeros(500, int), np.arange(500))
        assert drawn.codes.shape == (500, 2) and drawn.codes.all()
    assert accumulation_passes(
        global_batch_size=data.global_batch_size, micro_batch_size=data.micro_batch_size, num_ranks=8
    )


def test_published_settings_are_ours():
    """Each row of docs/published.csv: equal, or marked, and then its recipe says why; its test is there."""
    rows = runpy.run_path(str(ROOT / "docs/generate.py"))["published_rows"]()
    for names, setting, published, ours, test in rows:
        assert ours.startswith("differs: ") or ours == published, (names, setting)
        file, _, function = test.partition("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(), test
    apart = {name for names, _, _, ours, _ in rows for name in names if ours.startswith("differs: ")}
    assert {name for name in apart if not name.endswith("_like")} == {*VOLO_224, "vit_b16", "vit_b32", "vit_l32"}
    assert {name for names, *_ in rows for name in names} >= {*SMALL_BATCH, *VOLO} - {"volo_d4_448", "volo_d5_448"}


@pytest.mark.parametrize("name", ["deit3_s16", "deit3_b16_224"])
def test_the_rate_of_deit(name):
    """As the loop of DeiT sets it with timm's scheduler: after each epoch, and for that epoch."""
    from timm.scheduler import CosineLRScheduler

    peak, epochs = SMALL_BATCH[name][2], SMALL_BATCH[name][9]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    expected = []
    for epoch in range(epochs):
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(epoch)
    assert learning_rates(RECIPES[name]()) == pytest.approx(expected, rel=1e-9)


def test_the_optimizer_of_deit_is_apexs_lamb():
    """Ten steps of apex's algorithm in float64; biases, norms, positions and class token without decay and ratio."""
    config = replace(RECIPES["deit3_s16"](), model=ModelConfig(name="vit_nano32", img_size=64, num_classes=10))
    torch.manual_seed(0)
    model = zoo.create_model("vit_nano32", img_size=64, num_classes=10).double()
    optimizer = assembly.build_optimizer(config, model, impl="eager")
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in params.items()}
    for step in range(1, 11):
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p) * 10 ** (-step / 2)  # the clip stops in between
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        clip_gradients(optimizer, gradient_norm(optimizer), config.optim.clip_norm)
        optimizer.step()
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        for name, p in params.items():
            g, (m, v) = grads[name] / max(norm, 1.0), moments[name]
            m.mul_(0.9).add_(g, alpha=1 - 0.9)
            v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
            decay = 0.0 if p.ndim == 1 or name in ("pos_embed", "cls_token") else 0.05
            update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8) + decay * p
            p.sub_(update * (4e-3 * float(p.norm() / update.norm()) if decay else 4e-3))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), params[name], rtol=1e-5, atol=1e-8)  # our clip adds 1e-6 to the norm


def test_the_rate_of_plain_vits():
    """A warm-up of 10,000 steps from 0, which are 8 epochs at 1,024, then a cosine to 0; decay is 1e-4 at the peak."""
    config = RECIPES["plain_s16_like"]()
    plan = Plan(IMAGENET, 1024, 128, 90 * IMAGENET, seed=0)
    schedule = assembly.build_schedule(config, plan)
    for step in (0, 1, 9_999, 10_000, 12_345, 70_000, plan.num_steps - 1):  # big_vision's formula
        progress = max(0.0, (step - 10_000) / (plan.num_steps - 10_000))
        expected = 0.5 * (1 + math.cos(math.pi * progress)) * min(1.0, step / 10_000)
        assert schedule(step) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    middle = 10_000 + (plan.num_steps - 10_000) / 2
    assert schedule(round(middle)) == pytest.approx(0.5, abs=1e-4) and schedule(plan.num_steps) == 0
    assert assembly.peak_lr(config) * config.optim.weight_decay == pytest.approx(1e-4)


@pytest.mark.parametrize("name", ["deit3_s16", "deit3_b16", "plain_s16_like"])
def test_the_zoo_has_the_models_of_the_field(name):
    config = RECIPES[name]().model
    with torch.device("meta"):
        model = zoo.create_model(
            config.name, img_size=config.img_size, num_classes=1000, global_pool=config.global_pool
        )
    assert config.name.startswith("deit3") is name.startswith("deit3")
    assert ("gamma" in str(dict(model.named_parameters()).keys())) is name.startswith("deit3")  # layer scale
    assert choose({"recipe": name, "model.name": "vit_b16", "data.path": "/imagenet"}).recipe == name


def test_the_rate_follows_the_batch():
    base = RECIPES["volo_d5"]()
    # The published command has this batch: its learning rate is 1e-4 there, and 2.75e-4 by the published rule.
    config = replace(base, data=replace(base.data, global_batch_size=352))
    assert assembly.peak_lr(config) == pytest.approx(assembly.peak_lr(base) * 352 / 1024) == 2.75e-4


def test_large_batches_keep_what_is_not_the_optimizer():
    for name in ("volo_d1", "volo_d5"):
        ours, base = RECIPES[f"{name}_lamb"](), RECIPES[name]()
        check(ours)
        assert ours.data.global_batch_size == 32768 and ours.optim.name == "lamb"
        assert (ours.model, ours.augment, ours.loss) == (base.model, base.augment, base.loss)
        assert assembly.peak_lr(ours) == pytest.approx(3e-3 * math.sqrt(32768 / 2048))


def test_which_recipe_fine_tunes():
    given = {"model.name": "volo_d5", "data.path": "/imagenet", "model.weights": "volo_d5.pth"}
    assert choose(given | {"model.img_size": 512}).recipe == "volo_d5_512"
    assert choose(given | {"model.img_size": 224}).recipe == "volo_d5"
    assert choose(given | {"model.img_size": 512, "model.weights": None}).recipe == "volo_d5"
    with pytest.raises(ValueError, match="Recipe volo_d5_512 is a fine-tuning: give .* --init-from"):
        choose({"recipe": "volo_d5_512", "data.path": "/imagenet"})
    with pytest.raises(ValueError, match="Recipe deit3_b16_224 is a fine-tuning: give .* --init-from"):
        choose({"recipe": "deit3_b16_224", "data.path": "/imagenet"})


def test_a_fine_tuned_run_is_validated_without_the_weights_it_began_from(tmp_path):
    config = choose({"recipe": "volo_d1_384", "model.weights": "w"})
    (tmp_path / "config.yaml").write_text(dump(config))
    read, _ = validate.read([str(tmp_path)])
    assert read.recipe == "volo_d1_384" and not read.model.weights and read.model.img_size == 384


def test_the_quick_start_leaves_digits_as_they_are():
    """A mirrored 2 is none; the numbers of its comment are those of two ranks."""
    config = RECIPES["quickstart"]()
    check(config)
    assert (config.data.hflip, config.data.path, config.model.num_classes) == (0.0, "digits", 10)
    assert accumulation_passes(global_batch_size=256, micro_batch_size=32, num_ranks=2) == 4
    assert (config.data.global_batch_size, config.data.micro_batch_size) == (256, 32)


def test_cifar10_trains_and_tests_on_one_geometry():
    config = RECIPES["cifar10"]()
    assert (config.data.crop_padding, config.data.crop_pct) == (4, 1.0)
    assert (config.model.name, config.model.num_classes, config.model.weight_init) == ("vit_b16", 10, "jax")
    assert (config.optim.preset, config.optim.lr, config.optim.weight_decay) == ("colossal", 1.8e-2, 0.1)


@pytest.mark.parametrize(
    "name, ranks, shape",
    [
        ("cifar10_pipeline", 4, {"data": 2, "pipeline": 2}),
        ("cifar10_hybrid", 4, {"pipeline": 2, "tensor": 2}),
        ("vit_6b16_1d", 64, {"pipeline": 16, "tensor": 4}),
        ("vit_6b16_2d", 64, {"pipeline": 16, "row": 2, "column": 2}),
        ("vit_6b16_2.5d", 64, {"pipeline": 16, "row": 2, "column": 2}),
        ("vit_6b16_3d", 64, {"pipeline": 8, "x": 2, "y": 2, "z": 2}),
    ],
)
def test_recipes_whose_ranks_share_a_model_fit_it(name, ranks, shape):
    config = RECIPES[name]()
    check(config)
    sizes = config.parallel.shape().sizes
    data = config.parallel.shape().data_size(ranks)
    assert {axis: size for axis, size in ({"data": data} | sizes).items() if size > 1} == shape
    batch_size, micro_batch_size = config.data.global_batch_size, config.data.micro_batch_size
    assert accumulation_passes(global_batch_size=batch_size, micro_batch_size=micro_batch_size, num_ranks=data) == 1
    with torch.device("meta"):
        model = zoo.create_model(config.model.name, num_classes=config.model.num_classes or 1000)
    check_replica(config.parallel, model, batch_size=micro_batch_size)
    if config.model.name == "vit_6b16":
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(6.45e9, rel=5e-3)
