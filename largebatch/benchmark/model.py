"""Forward and backward of a zoo model beside timm's model of the same name, one process.

Every contender computes `model(images)` in training mode, the cross entropy and all gradients. This holds for VOLO as
well: its plain forward pass uses both heads, in ours and in timm's, but timm's `forward_train` leaves out the class
head. On CPUs the backward pass of torch's fused attention, timm's default, is slow, so timm's model without it is
another contender. All use the stochastic depth of the model's recipe; MFU also counts the work that it saves.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from largebatch.benchmark.measure import (
    Contender,
    Report,
    Round,
    add_device_options,
    compare,
    matmul_flops,
    set_up_device,
)
from largebatch.native.attention import choose_attention
from largebatch.precision import DTYPES, autocast, choose_precision
from largebatch.recipes import RECIPES
from zoo import create_model, set_fused_attn, vit, volo

TIMM_NAMES = {name: structure.timm_name for zoo in (vit, volo) for name, structure in zoo.STRUCTURES.items()}
PASSES = 2  # per round; the second pass adds to gradients, as accumulation does


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--model", default="vit_b32", help="zoo model")
    parser.add_argument("--img-size", type=int, default=224, help="image side in pixels")
    parser.add_argument("--batch-size", type=int, help="images per pass; default: 32, and 8 for a VOLO")
    parser.add_argument("--precision", default="auto", choices=["auto", *DTYPES], help="autocast type, as in training")
    parser.add_argument("--compile", action="store_true", help="as --run.compile; ours alone")
    parser.add_argument("--grad-checkpointing", action="store_true", help="as --model.grad_checkpointing; ours alone")
    parser.add_argument("--vs", nargs="+", default=["timm", "timm-unfused"], choices=["timm", "timm-unfused", "none"])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each contender, 2 passes each")
    add_device_options(parser)


def run(options: argparse.Namespace) -> Report:
    """Measure forward and backward passes."""
    device = set_up_device(options)
    if options.batch_size is None:
        options.batch_size = 8 if options.model in volo.STRUCTURES else 32
    if options.precision == "auto":
        options.precision = choose_precision(device)
    makers: dict[str, Callable[[], nn.Module]] = {"largebatch": partial(ours, options, device)}
    if "timm" in options.vs:
        makers["timm"] = partial(timms, options)
    if "timm-unfused" in options.vs:
        makers["timm, unfused attention"] = lambda: set_fused_attn(timms(options), False)
    contenders = [Contender(name, partial(_opened, make, options, device)) for name, make in makers.items()]
    results = compare(contenders, device=device, rounds=options.rounds)
    images = PASSES * options.batch_size
    flops, ceiling = training_flops(options.model, options.img_size), matmul_flops(device, options.precision)
    notes = [
        f"{result.name}: {mfu(images / sorted(result.seconds)[len(result.seconds) // 2], flops, ceiling)}"
        for result in results
    ]
    title = f"{options.model} at {options.img_size} px, forward and backward, {options.precision}"
    title += f", batch {options.batch_size}"
    return Report("model", title, results, device, images=images, notes=notes)


@contextmanager
def _opened(make: Callable[[], nn.Module], options: argparse.Namespace, device: torch.device) -> Iterator[Round]:
    torch.manual_seed(0)
    model = make().to(device).train()
    images = torch.randn(options.batch_size, 3, options.img_size, options.img_size, device=device)
    labels = torch.randint(0, 1000, (options.batch_size,), device=device)

    def passes() -> None:
        for _ in range(PASSES):
            with autocast(device, options.precision):
                loss = F.cross_entropy(model(images).float(), labels)
            loss.backward()
        model.zero_grad(set_to_none=True)

    yield passes


def ours(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The zoo's model as training builds it."""
    model = create_model(
        options.model,
        img_size=options.img_size,
        drop_path_rate=drop_path_rate(options.model),
        grad_checkpointing=options.grad_checkpointing,
    )
    if options.compile:
        model.compile()
    return choose_attention(model, device)


def timms(options: argparse.Namespace) -> nn.Module:
    """The same model from timm, as timm's training script would make it."""
    import timm

    name, rate = timm_name(options.model), drop_path_rate(options.model)
    return timm.create_model(name, img_size=options.img_size, drop_path_rate=rate)


def drop_path_rate(model: str) -> float:
    """The rate of stochastic depth in the model's recipe; 0 without a recipe."""
    return RECIPES[model]().model.drop_path_rate if model in RECIPES else 0.0


def timm_name(model: str) -> str:
    """timm's name of a model of the zoo."""
    if model not in TIMM_NAMES:
        raise ValueError(f"--vs timm: timm's name of {model} is not known here; use --vs none.")
    return TIMM_NAMES[model]


def training_flops(model: str, img_size: int) -> float:
    """FLOPs of one image forward and backward: three times those of the forward pass, without recomputation.

    Only matrix products count, as usual for MFU; 26.5 GFLOP for ViT-B/32 at 224 px.
    """
    with torch.device("meta"):
        module = set_fused_attn(create_model(model, img_size=img_size), False).eval()
        counter = FlopCounterMode(display=False)
        with counter:
            module(torch.empty(1, 3, img_size, img_size))
    return 3 * counter.get_total_flops()


def mfu(images_per_s: float, flops: float, ceiling: float) -> str:
    """Describe the model FLOP utilisation of one rank; images_per_s and ceiling are those of one rank, too."""
    achieved = images_per_s * flops
    share = f"{100 * achieved / ceiling:.1f} %"
    return f"{achieved / 1e9:.0f} GFLOP/s per rank, MFU {share} of the {ceiling / 1e9:.0f} GFLOP/s of a matrix product"
