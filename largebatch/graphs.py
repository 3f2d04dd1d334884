"""Passes of a micro-batch as CUDA graphs: the host starts a few of them in a pass, instead of each kernel.

The model is cut into consecutive segments. Each is a graph forward and a graph backward, made by torch's
`make_graphed_callables`; the loss stays outside. When the backward graph of a segment has been started, autograd adds
the gradients of its weights to those there are, and Horovod begins to reduce them while the earlier segments follow. So
all passes are alike, with accumulation and without. One graph of a whole pass, additions included, would save these
additions, a launch for each weight, and the copies of tokens between segments; but in the last pass of a step nothing
could be reduced before its end.

A graph reads and writes the same memory in each replay. This has three consequences.

- A gradient comes in memory that the next replay overwrites. If a weight has no gradient yet, autograd would keep that
  memory as its gradient. So each weight gets one of zeros before the pass, and autograd then adds.
- The random numbers are those of the seed at the replay, in the order of the plain model. So they depend on the pass.
- Another shape, frozen weights, evaluation or a copy of the model need the plain model. They get it: the graphs are no
  part of the model, and the objective asks `Graphs.fit` in each pass.

Graphs can be wrong without an error. So before the first step each rank computes two accumulated passes with and
without them, and if the gradients of one rank differ, no rank uses graphs.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.agreement import first_cause, first_line, micro_batch
from largebatch.config import TrainConfig
from largebatch.losses import Objective
from largebatch.precision import autocast
from largebatch.ranks import Communicator
from zoo.segments import segments_of

logger = logging.getLogger(__name__)

SEGMENTS = 4  # Horovod reduces the gradients of one while the backward pass goes on with the next
MOVE = 0.02  # standard deviation by which a trial moves each weight
# Of ||difference|| / ||gradient|| for each weight, by precision. Other draws or lost passes give about 1. The same
# products may be rounded otherwise in a graph, where torch chooses other workspaces.
BOUNDS = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}


class Graphs(nn.Module):
    """The training passes of a model as graphs, for micro-batches of one size."""

    def __init__(self, model: nn.Module, images: Tensor, precision: str) -> None:
        """Capture the passes of a model on micro-batches like `images`; ValueError if it cannot be cut.

        Weights, gradients and random state stay as they are. No graph of autograd may be alive that leads to the
        weights: torch would wait for its stream, which a capture cannot. Threads that use the GPU would end it, too, so
        it comes before the loaders open.
        """
        super().__init__()
        segments = segments_of(model, SEGMENTS)
        if not segments:
            raise ValueError("only a ViT can be cut into segments for CUDA graphs")
        self.model, self.weights = model.train(), [*model.parameters()]
        gc.collect()  # a graph of autograd may be part of a cycle
        with _undisturbed(images.device), autocast(images.device, precision, cache=False):
            inputs = _inputs_of(segments, images)
            self.segments = nn.ModuleList(capture(tuple(segments), tuple((x,) for x in inputs)))
            self.captured = self._state(images)
        # The weights' nodes of autograd live on the stream of the capture. So torch adds gradients there, waits for it
        # at the end of each backward pass, and would warn that this costs time.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def objective(self, serial: Objective) -> Objective:
        """Return an objective that computes by graphs what fits them, and all else as `serial` does."""
        return lambda model, batch: serial(self if self.fit(model, batch.images) else model, batch)

    def fit(self, model: nn.Module, images: Tensor) -> bool:
        """Return whether the graphs compute this pass: one of training, with all as it was at the capture."""
        training = model is self.model and model.training and torch.is_grad_enabled() and not images.requires_grad
        return training and self._state(images) == self.captured

    def _state(self, images: Tensor) -> tuple[Any, ...]:
        """Return what the graphs were made for, and cannot follow."""
        kind = images.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        weights = [(weight.data_ptr(), weight.requires_grad) for weight in self.weights]
        return images.shape, images.dtype, images.device, casts, weights

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> logits (B, K), in memory that the next pass overwrites"""
        missing = [weight for weight in self.weights if weight.requires_grad and weight.grad is None]
        zeros = [torch.empty_like(weight) for weight in missing]
        if zeros:
            torch._foreach_zero_(zeros)
        for weight, zero in zip(missing, zeros):
            weight.grad = zero
        x = images
        for segment in self.segments:
            x = segment(x)
        return x


def capture(segments: tuple[Any, ...], inputs: tuple[tuple[Tensor, ...], ...]) -> Any:
    """Return the segments with the graphs of torch as their forward; inputs: memory that each will read.

    A capture that fails leaves torch's allocator as it was in it, and memory that several streams use would never be
    free again. So it is put back here.
    """
    pool = torch.cuda.graph_pool_handle()
    try:
        return torch.cuda.make_graphed_callables(segments, inputs, pool=pool)
    except BaseException:
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # it is as it should be: the failure came before a capture
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


def _inputs_of(segments: list[Any], images: Tensor) -> list[Tensor]:
    """Return memory for the input of each segment, which needs a gradient as in training."""
    inputs, x = [], images.clone()
    for segment in segments:
        x = x.detach().requires_grad_(x.requires_grad)
        inputs.append(x)
        x = segment(x)
    return inputs


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the random state after the block, which draws, and the stream, which a capture that fails leaves."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        with torch.cuda.stream(torch.cuda.current_stream(device) if on_gpu else None):
            yield


# -- before the first step -------------------------------------------------------------------------------------------


def graph_passes(
    config: TrainConfig, model: nn.Module, objective: Objective, device: torch.device, comm: Communicator
) -> Graphs | None:
    """Capture the passes of a model, as --run.graphs says; None if it cannot be cut, or one rank cannot use them.

    Every rank calls it, with the model on its device and before the optimizer is wrapped. The model stays as it is.
    """
    if not segments_of(model, SEGMENTS):
        if comm.rank == 0:
            logger.warning("--run.graphs true is not used: only a ViT can be cut into segments for CUDA graphs")
        return None
    comm.progress("capturing graphs")
    graphs, cause = _try_out(config, model, objective, device)
    if not (cause := first_cause(comm, cause, name="build/graphs")):
        return graphs
    if comm.rank == 0:
        logger.warning("--run.graphs true is not used: %s; all ranks compute without it", cause)
    del graphs
    with comm.together("computing without graphs"):
        _recover(device)
    return None


def can_capture(device: torch.device) -> bool:
    """Return whether a device has graphs."""
    return device.type == "cuda"


def _try_out(
    config: TrainConfig, model: nn.Module, objective: Objective, device: torch.device
) -> tuple[Graphs | None, str]:
    """Return graphs, or why this rank cannot use them, as the end of a sentence."""
    if not can_capture(device):
        return None, f"computes on the {device.type.upper()}: expected a GPU"
    try:
        with _undisturbed(device):
            expected = gradients(config, model, objective, device)
            images = micro_batch(config, model, device).images
            graphs = Graphs(model, images, config.run.precision)
            found = gradients(config, model, graphs.objective(objective), device)
    except Exception as error:  # of a capture, whose end may then raise another; of the driver; a lack of memory
        return None, f"cannot compute a pass by graphs ({first_line(error.__context__ or error)})"
    cause = difference(model, found, expected, bound=BOUNDS[config.run.precision])
    return (None, cause) if cause else (graphs, "")


def gradients(config: TrainConfig, model: nn.Module, objective: Objective, device: torch.device) -> list[Tensor | None]:
    """Return the gradients of two accumulated passes over random images, each with draws of its own, at other weights.

    At those of a new model, whose head is often zero, no weight below the head would have a gradient. And graphs have
    to read the weights as they are at the replay.
    """
    weights: list[Tensor] = [*model.parameters()]
    kept = [weight.detach().clone() for weight in weights]
    model.train()
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            for weight in weights:
                weight.add_(torch.randn_like(weight), alpha=MOVE)
        for number in range(2):
            batch = micro_batch(config, model, device, torch.randn)
            batch = batch._replace(targets=batch.targets.softmax(dim=1))
            torch.manual_seed(number)
            with autocast(device, config.run.precision):
                loss = objective(model, batch)
            loss.backward()
        return [weight.grad for weight in weights]
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)
        model.zero_grad(set_to_none=True)


def difference(model: nn.Module, found: list[Tensor | None], expected: list[Tensor | None], *, bound: float) -> str:
    """Return which gradient differs, as the end of a sentence; empty: none, relative to its norm."""
    for (name, _), ours, theirs in zip(model.named_parameters(), found, expected, strict=True):
        if ours is None or theirs is None:
            if ours is not theirs:
                return f"computes {'a' if theirs is None else 'no'} gradient of {name} by graphs"
            continue
        norm, distance = float(theirs.norm()), float((ours - theirs).norm())
        if not distance <= bound * norm:  # true for nan
            return f"computes another gradient of {name} by graphs (norm {norm:.3g}, distance {distance:.3g})"
    return ""


def _recover(device: torch.device) -> None:
    """Free the memory of graphs; RuntimeError if a capture that failed has left the device unable to compute."""
    gc.collect()  # a segment and its new forward refer to each other
    if device.type != "cuda":
        return
    try:
        torch.cuda.empty_cache()
        torch.rand(1, device=device).item()
    except Exception as error:  # of torch, of the driver
        raise RuntimeError(
            f"The GPU computes nothing any more after a trial of --run.graphs true ({first_line(error)}): leave the "
            "option out."
        ) from error
