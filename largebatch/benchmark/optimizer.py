"""One optimizer step on the shapes of a model, with the clip by global norm.

Every contender has its own parameters and random gradients, which are not in the cache when its step begins, as in a
real run.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.benchmark.measure import Contender, Report, Round, add_device_options, compare, set_up_device
from largebatch.optim import build_optimizer, clip_gradients, gradient_norm
from zoo import create_model
from zoo.model import ZooModel

CLIP_NORM = 1.0
LR, WEIGHT_DECAY = 1e-3, 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="vit_b32", help="zoo model whose parameters are updated")
    parser.add_argument("--impl", default="auto", help="auto, compile, eager or plain (largebatch.optim.Lamb)")
    parser.add_argument("--vs", nargs="+", default=["timm", "torch"], choices=[*PEERS, "none"])
    parser.add_argument("--rounds", type=int, default=20, help="measured steps of each contender")
    add_device_options(parser)


def run(options: argparse.Namespace) -> Report:
    device = set_up_device(options)
    makers: dict[str, Callable[[nn.Module], Round]] = {"largebatch": partial(ours, impl=options.impl)}
    makers |= {name: make for choice, (name, make) in PEERS.items() if choice in options.vs}
    contenders = [Contender(name, partial(_opened, options.model, device, make)) for name, make in makers.items()]
    results = compare(contenders, device=device, rounds=options.rounds, warmup=3)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in create_model(options.model).parameters())
    title = f"optimizer step, {options.model}, {count / 1e6:.1f} M parameters, fp32"
    return Report("optimizer", title, results, device)


@contextmanager
def _opened(model: str, device: torch.device, make: Callable[[nn.Module], Round]) -> Iterator[Round]:
    """Prepare parameters, with gradients whose norm is above the clip, as in the first epochs."""
    torch.manual_seed(0)
    module = create_model(model).to(device)
    for parameter in module.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    yield make(module)


def ours(model: nn.Module, *, impl: str) -> Round:
    return _clipped(build_optimizer(model, lr=LR, weight_decay=WEIGHT_DECAY, impl=impl))


def _clipped(optimizer: Optimizer) -> Round:
    def step() -> None:
        clip_gradients(optimizer, gradient_norm(optimizer), CLIP_NORM)
        optimizer.step()

    return step


def timm_lamb(model: nn.Module) -> Round:
    from timm.optim import Lamb, param_groups_weight_decay

    without_decay = cast(ZooModel, model).no_weight_decay()
    groups = param_groups_weight_decay(model, WEIGHT_DECAY, no_weight_decay_list=without_decay)
    return Lamb(groups, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP_NORM).step


def adamw(model: nn.Module) -> Round:
    """torch's fused AdamW without clip and norms: the lower bound that memory sets."""
    return build_optimizer(model, name="adamw", lr=LR, weight_decay=WEIGHT_DECAY).step


def muon(model: nn.Module) -> Round:
    """torch's Muon for the matrices and its fused AdamW for the rest, with our clip."""
    return _clipped(build_optimizer(model, name="muon", lr=LR, weight_decay=WEIGHT_DECAY))


def apex_lamb(model: nn.Module) -> Round:
    try:
        from apex.optimizers import FusedLAMB
    except ImportError:
        other = "the package of that name in the Python registry is something else"
        where = f"see https://github.com/NVIDIA/apex ({other})"
        raise ValueError(f"--vs apex: NVIDIA's apex is not installed; {where}.") from None
    return FusedLAMB(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP_NORM).step


PEERS: dict[str, tuple[str, Callable[[nn.Module], Round]]] = {
    "timm": ("timm Lamb", timm_lamb),
    "torch": ("torch AdamW, no clip", adamw),
    "muon": ("Muon and AdamW", muon),
    "apex": ("apex FusedLAMB", apex_lamb),
}
