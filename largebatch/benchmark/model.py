"""Forward and backward of zoo models beside timm's models of the same names, one process.

Every contender trains as the model's recipe does: with its dropout and stochastic depth; a VOLO through
`forward_train`, with mix-token and the loss of its tokens. With --plain, and for models without a recipe, it computes
`model(images)` in training mode and the cross entropy, without dropout; timm's VOLO uses both heads there as well.
On CPUs the backward pass of torch's fused attention, timm's default, is slow, so timm's model without it is another
contender. MFU counts the model's products; "executed" leaves out those that our stochastic depth saves.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from largebatch.assembly import build_objective
from largebatch.augment import Augmented, MixBox, draw_mix_box, one_hot
from largebatch.benchmark.ceiling import measure_ceiling, mfu
from largebatch.benchmark.measure import Contender, Report, Reports, Round, add_device_options, compare, set_up_device
from largebatch.compiling import compile_passes
from largebatch.config import ModelConfig, TrainConfig
from largebatch.flops import training_flops
from largebatch.native.attention import choose_attention
from largebatch.precision import DTYPES, autocast, choose_precision
from largebatch.recipes import RECIPES
from zoo import create_model, set_fused_attn, vit, volo
from zoo.blocks import compile_blocks
from zoo.model import ZooModel

TIMM_NAMES = {name: structure.timm_name for zoo in (vit, volo) for name, structure in zoo.STRUCTURES.items()}
RATES = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "drop_path_rate")
VARIANTS = {
    "eager": "largebatch",
    "compiled": "largebatch, compiled",
    "blocks": "largebatch, blocks compiled",
    "graphs": "largebatch, compiled to CUDA graphs",  # no option of training: whether it should become one is measured
}
PASSES = 2  # per round; the second pass adds to gradients, as accumulation does


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", default=["vit_b32"], help="zoo models; several lists are combined")
    parser.add_argument("--img-size", type=int, nargs="+", default=[224], help="image sides in pixels")
    sizes = "images per pass; default: the recipe's micro-batch on a GPU; on a CPU 32, and 8 for a VOLO"
    parser.add_argument("--batch-size", type=int, nargs="+", default=[0], help=sizes)
    parser.add_argument("--precision", default="auto", choices=["auto", *DTYPES], help="autocast type, as in training")
    parser.add_argument("--plain", action="store_true", help="no dropout, and the cross entropy of the classes alone")
    parser.add_argument("--variants", nargs="+", default=["eager"], choices=[*VARIANTS], help="of ours")
    parser.add_argument("--grad-checkpointing", action="store_true", help="as --model.grad_checkpointing; ours alone")
    parser.add_argument("--vs", nargs="+", default=["timm", "timm-unfused"], choices=[*PEERS, "none"])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each contender, 2 passes each")
    add_device_options(parser)


def run(options: argparse.Namespace) -> Reports:
    device = set_up_device(options)
    if options.precision == "auto":
        options.precision = choose_precision(device)
    cases = list(itertools.product(options.model, options.img_size, options.batch_size))
    return Reports(measure(options, device, *case, alone=len(cases) == 1) for case in cases)


def measure(
    options: argparse.Namespace, device: torch.device, model: str, img_size: int, batch_size: int, *, alone: bool = True
) -> Report:
    """Measure one model; batch_size 0 is the default. alone: without other reports, whose files need longer names."""
    config = config_of(model, img_size, plain=options.plain)
    batch_size = batch_size or default_batch_size(config, device)
    mine = partial(ours, config, device, grad_checkpointing=options.grad_checkpointing)
    makers: dict[str, Callable[[], nn.Module]] = {
        VARIANTS[variant]: partial(mine, variant=variant) for variant in options.variants
    }
    makers |= {name: partial(make, config) for choice, (name, make) in PEERS.items() if choice in options.vs}
    opened = partial(_opened, config=config, batch_size=batch_size, precision=options.precision, device=device)
    graphs = VARIANTS["graphs"]
    contenders = [Contender(name, partial(opened, make, in_place=name == graphs)) for name, make in makers.items()]
    results = compare(contenders, device=device, rounds=options.rounds)
    images, ceiling = PASSES * batch_size, measure_ceiling(device, options.precision)
    flops = training_flops(model, img_size)
    executed = training_flops(model, img_size, drop_path_rate=config.model.drop_path_rate)
    # timm masks samples after a layer, and the model that is compiled as a whole does the same
    saving = {VARIANTS[variant]: executed for variant in ("eager", "blocks")}
    rates = {result.name: images / median(result.seconds) for result in results}
    notes = [f"{name}: {mfu(rate, flops, ceiling, executed=saving.get(name))}" for name, rate in rates.items()]
    title = f"{model} at {img_size} px, forward and backward, {options.precision}, batch {batch_size}"
    files = "model" if alone else f"model_{model}_{img_size}_{batch_size}"
    work = {"model": model, "img_size": img_size, "precision": options.precision, "micro_batch": batch_size}
    work |= {"data": "", "plain": options.plain}
    return Report(files, title, results, device, images=images, notes=notes, work=work)


@contextmanager
def _opened(
    make: Callable[[], nn.Module],
    *,
    config: TrainConfig,
    batch_size: int,
    precision: str,
    device: torch.device,
    in_place: bool,
) -> Iterator[Round]:
    """Prepare a model and a batch. in_place: gradients stay where they are, for a CUDA graph."""
    torch.manual_seed(0)
    model = make().to(device).train()
    objective = build_objective(config, model)
    batch, draw_box = training_batch(config, batch_size, device), box_of(config)

    def passes() -> None:
        for _ in range(PASSES):
            with autocast(device, precision):
                loss = objective(model, batch._replace(mix_box=draw_box()))
            loss.backward()
        model.zero_grad(set_to_none=not in_place)

    if in_place:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    yield passes


# -- the work of a recipe -------------------------------------------------------------------------------------------


def config_of(model: str, img_size: int, *, plain: bool = False) -> TrainConfig:
    """Return a model's recipe for images of this size; `plain`, or without a recipe, no dropout or loss of tokens."""
    config = RECIPES[model]() if model in RECIPES else TrainConfig(model=ModelConfig(name=model))
    if plain:
        depth = config.model.drop_path_rate
        config = TrainConfig(data=config.data, model=ModelConfig(name=model, drop_path_rate=depth))
    return replace(config, model=replace(config.model, img_size=img_size, num_classes=config.model.num_classes or 1000))


def default_batch_size(config: TrainConfig, device: torch.device) -> int:
    """Return a batch that keeps a GPU busy, and that a CPU computes in seconds."""
    if device.type != "cpu":
        return config.data.micro_batch_size
    return 8 if config.model.name in volo.STRUCTURES else 32


def training_batch(config: TrainConfig, batch_size: int, device: torch.device) -> Augmented:
    """Return random images with their targets, and targets of each token if the config's loss has them."""
    side, classes = config.model.img_size, config.model.num_classes
    images = torch.randn(batch_size, 3, side, side, device=device)
    targets = one_hot(torch.randint(0, classes, (batch_size,), device=device), classes)
    if not config.loss.dense_weight:
        return Augmented(images, targets)
    return Augmented(images, targets, targets[:, None].repeat(1, (side // volo.CELL) ** 2, 1))


def box_of(config: TrainConfig) -> Callable[[], MixBox | None]:
    """Return a function that draws the box of each pass as `Augment` does: None without mix-token."""
    if not config.mixes_tokens:
        return lambda: None
    generator = torch.Generator().manual_seed(0)
    return lambda: draw_mix_box(config.model.img_size // volo.CELL, generator=generator)


# -- the contenders -------------------------------------------------------------------------------------------------


def ours(config: TrainConfig, device: torch.device, *, variant: str, grad_checkpointing: bool) -> nn.Module:
    values = replace(config.model, grad_checkpointing=grad_checkpointing).arguments() | {"weights": None}
    model = create_model(**values)
    choose_attention(model, device)
    if variant == "blocks":
        compile_blocks(model)
    if variant == "compiled":
        compiled(model)
    if variant == "graphs":
        compiled(model, mode="reduce-overhead")
    return model


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    compile_passes(model, **options)
    return model


def timms(config: TrainConfig) -> nn.Module:
    import timm

    c = config.model
    options: dict[str, Any] = {rate: getattr(c, rate) for rate in RATES if getattr(c, rate)}
    if config.mixes_tokens:
        options["use_mix_token"] = True
    model = timm.create_model(timm_name(c.name), img_size=c.img_size, num_classes=c.num_classes, **options)
    return TimmsTokens(model) if config.loss.dense_weight else model


class TimmsTokens(nn.Module):
    """timm's VOLO with the interface of ours: its `forward_train` leaves the head of the class out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward_train(self, images: Tensor, mix_box: MixBox | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits of class and cells; timm ignores `mix_box` and draws its own."""
        token, cells, _ = self.model.forward_train(images)  # type: ignore[operator]
        return self.model.head(token), cells  # type: ignore[operator]

    def no_weight_decay(self) -> set[str]:
        return {f"model.{name}" for name in cast(ZooModel, self.model).no_weight_decay()}


PEERS: dict[str, tuple[str, Callable[[TrainConfig], nn.Module]]] = {
    "timm": ("timm", timms),
    "timm-unfused": ("timm, unfused attention", lambda config: set_fused_attn(timms(config), False)),
    "timm-compiled": ("timm, compiled", lambda config: compiled(timms(config))),
}


def timm_name(model: str) -> str:
    if not TIMM_NAMES.get(model):
        raise ValueError(f"--vs timm: timm's name of {model} is not known here; use --vs none.")
    return TIMM_NAMES[model]
