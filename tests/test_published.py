"""The published recipes beside plain loops: losses of the first steps, from the same augmented images.

The loops are written here from the published descriptions, with timm's models and torch's operations alone.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import zoo  # lets timm be imported beside torch's CPU build
from largebatch import assembly
from largebatch import config as configs
from largebatch.augment import Augmented
from largebatch.engine import Trainer
from largebatch.ranks.single import Single
from largebatch.recipes import choose
from zoo.vit import STRUCTURES, Structure

CPU, STEPS = torch.device("cpu"), 20
TINY: dict[str, Any] = dict(embed_dim=48, depth=2, num_heads=3)
DATA = ["--data=digits", "--data.global_batch_size=256", "--data.micro_batch_size=64", "--model.img_size=32"]
DECAY = 10.0  # more than published, so that it shows in 20 losses
RUN = ["--run.precision=fp32", "--run.device=cpu", "--run.eval_every=never", "--run.check_replicas=", "--log.to=null"]


def trainer_of(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, *given: str) -> Trainer:
    """The trainer of a recipe for a tiny model of its kind on the digits."""
    for name, structure in STRUCTURES.items():
        tiny = Structure(16, **TINY, timm_name="", family=structure.family)
        monkeypatch.setitem(STRUCTURES, name, tiny)
    argv = [f"--recipe={recipe}", *DATA, *RUN, f"--run.folder={tmp_path}", "--model.drop_path_rate=0"]
    argv += [f"--optim.weight_decay={DECAY}", *given]
    return assembly.build_trainer(configs.parse(argv, choose_recipe=choose), Single(), device=CPU)


def trained(trainer: Trainer) -> tuple[list[float], list[list[Augmented]]]:
    """The loss of each step, and the augmented micro-batches of its passes."""
    losses, seen, objective = [], [], trainer.objective

    def seeing(model: nn.Module, batch: Augmented) -> Tensor:
        seen[-1].append(Augmented(batch.images.clone(), batch.targets.clone()))
        return objective(model, batch)

    trainer.objective = seeing
    batches: Iterator[Any] = trainer.open_batches(0)
    for _ in range(STEPS):
        seen.append([])
        losses.append(float(trainer.train_step(batches).loss_sum))
    return losses, seen


def plain(
    model: nn.Module,
    seen: list[list[Augmented]],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    rate: Callable[[int], float],
    update: Callable[[nn.Parameter, dict[str, Any], float, int], None],
    clip: float,
) -> list[float]:
    """A loop that accumulates the mean over the images of a step, clips, and updates each parameter."""
    losses, states = [], {p: dict[str, Any](m=torch.zeros_like(p), v=torch.zeros_like(p)) for p in model.parameters()}
    for step, passes in enumerate(seen):
        total, images = 0.0, sum(len(batch.images) for batch in passes)
        for p in model.parameters():
            p.grad = None
        for batch in passes:
            loss = loss_of(model(batch.images), batch.targets) * len(batch.images) / images
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for p in model.parameters():
                update(p, states[p], rate(step), step + 1)
    return losses


def moments(p: nn.Parameter, state: dict[str, Any], step: int, eps: float) -> Tensor:
    """Adam's update with the usual rates of 0.9 and 0.999, before decay."""
    assert p.grad is not None
    state["m"] = 0.9 * state["m"] + 0.1 * p.grad
    state["v"] = 0.999 * state["v"] + 0.001 * p.grad**2
    return state["m"] / (1 - 0.9**step) / ((state["v"] / (1 - 0.999**step)).sqrt() + eps)


def apex_lamb(p: nn.Parameter, state: dict[str, Any], lr: float, step: int) -> None:
    """NVIDIA's LAMB as timm calls it: 1-D tensors, token and positions have neither decay nor a ratio."""
    update = moments(p, state, step, 1e-8)
    if p.ndim > 1 and p.shape[0] != 1:  # the class token and the position embedding have no decay
        update = update + DECAY * p
        update = update * p.norm() / update.norm()
    p -= lr * update


def test_deit3(monkeypatch, tmp_path):
    """Binary cross entropy on one-hot targets, LAMB, layer scale, and a cosine that lags an epoch behind."""
    trainer = trainer_of("deit3_b16", monkeypatch, tmp_path, "--schedule.warmup=1 epochs", "--run.duration=5 epochs")
    sizes: dict[str, Any] = dict(img_size=32, patch_size=16, num_classes=10, init_values=1e-4, no_embed_class=True)
    model = VisionTransformer(**TINY, **sizes)
    model.load_state_dict(trainer.model.state_dict())
    ours, seen = trained(trainer)
    assert trainer.plan.epoch_images == 1280 and {len(passes) for passes in seen} == {4}

    def rate(step: int) -> float:
        epoch = max(0, step // 5 - 1)  # the scheduler steps after an epoch, by the number of that epoch
        cosine = 1e-5 + (3e-3 - 1e-5) * 0.5 * (1 + math.cos(math.pi * epoch / 5))
        return 1e-6 if epoch < 1 else cosine

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, (targets > 0).float())

    theirs = plain(model, seen, loss_of, rate, apex_lamb, clip=1.0)
    assert ours == pytest.approx(theirs, rel=1e-5) and theirs[-1] < theirs[0]
    fresh = zoo.create_model("deit3_b16", img_size=32, num_classes=10)
    assert fresh.blocks[0].ls1.gamma.mean().item() == pytest.approx(1e-4)


def test_plain(monkeypatch, tmp_path):
    """Softmax cross entropy, fixed positions, a mean of all tokens, and a decay that follows the schedule alone."""
    given = ["--schedule.warmup=5 steps", "--run.duration=25 steps"]
    given += ["--augment.auto_augment=rand-m10"]  # that of the recipe moves digits of 32 pixels by 100
    trainer = trainer_of("plain_s16_like", monkeypatch, tmp_path, *given)
    sizes: dict[str, Any] = dict(img_size=32, patch_size=16, num_classes=10, class_token=False, global_pool="avg")
    model = VisionTransformer(**TINY, **sizes, fc_norm=False, act_layer="gelu_tanh")
    model.load_state_dict(trainer.model.state_dict())
    model.pos_embed.requires_grad_(False)
    assert not trainer.model.head.weight.any() and not trainer.model.head.bias.any()
    ours, seen = trained(trainer)

    def schedule(step: int) -> float:
        return step / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 20))

    def update(p: nn.Parameter, state: dict[str, Any], share: float, step: int) -> None:
        if p.grad is not None:
            change = 1e-3 * share * moments(p, state, step, 1e-8)
            p -= change + (1e-3 * DECAY * share * p if p.ndim > 1 else 0)  # kernels alone

    theirs = plain(model, seen, F.cross_entropy, schedule, update, clip=1.0)
    assert ours == pytest.approx(theirs, rel=1e-5) and theirs[-1] < theirs[0]
