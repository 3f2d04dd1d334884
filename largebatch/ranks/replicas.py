"""Replicas: the copies of a model on the data ranks begin alike, are trained alike, and are compared.

Copies with the same weights, options and batches stay equal to the last bit. So in each step the ranks compare a digest
of options and batches (`Votes`), and now and then a sum of the bits of each tensor.
"""

import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from largebatch.bit_sums import bit_sums, digest
from largebatch.ranks.mistakes import Mistake
from largebatch.ranks.stopped import Stopped

DIGEST = 2**26  # the square of a smaller number, times the number of ranks, fits into 63 bits
PLAIN = {type(None), bool, int, float, str}
OFTEN = 1024  # steps; up to there the weights are compared after 1, 2, 4, ... steps, then after each so many


# -- in each step ----------------------------------------------------------------------------------------------------


class Votes:
    """The sum over the ranks of what each sends in a step: flags of its gradients, digests that must be alike."""

    def __init__(self, comm: Any, handle: Any) -> None:
        self.comm, self.handle = comm, handle
        self.alike = True

    @staticmethod
    def begin(comm: Any, optimizer: Optimizer, used: Tensor) -> "Votes":
        """Send an int64 flag for each gradient, and the digests of the param groups and of the columns."""
        digests = [value for digest in (digest_of(numbers(optimizer)), comm.columns) for value in (digest, digest**2)]
        sent = torch.cat([torch.tensor(digests), used])
        return Votes(comm, comm.start_allreduce(sent, name="votes", among="data"))

    def finish(self) -> list[int]:
        """Wait for the sum; return how many ranks have each gradient."""
        *sums, _ = received = self.comm.finish(self.handle).tolist()
        # Equal numbers, and only these, have a square of the sum that is so many times the sum of the squares.
        size = self.comm.data_size
        self.alike = all(size * squares == total**2 for total, squares in (received[:2], received[2:4]))
        return received[4:]


def numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each param group that are plain values."""
    return [{key: group[key] for key in sorted(group) if _is_plain(group[key])} for group in optimizer.param_groups]


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or isinstance(value, float) or type(value) is tuple and all(map(_is_plain, value))


def digest_of(value: Any) -> int:
    """Return a digest, less than DIGEST, of the text of a value."""
    return zlib.crc32(repr(value).encode()) % DIGEST


def refuse_unlike(comm: Any, optimizer: Optimizer) -> None:
    """Raise Stopped on all ranks, with the first difference from rank 0. A collective."""
    (first, columns_of_0), *others = comm.allgather_object((numbers(optimizer), comm.columns), name="votes/numbers")
    for rank, (theirs, its_columns) in enumerate(others, start=1):
        for number, (group, other) in enumerate(zip(first, theirs)):
            for key in [key for key in group | other if repr(group.get(key)) != repr(other.get(key))]:
                raise Stopped(
                    f"param group {number} has {key} {other.get(key)} on rank {rank} and {group.get(key)} on rank 0, "
                    "so the weights would differ: change it on all ranks alike; a scheduler that follows a loss needs "
                    "that of all ranks (comm.allreduce(loss, name=\"loss\") / comm.size)."
                )
        if its_columns != columns_of_0:
            raise Stopped(
                f"comm.micro_batches got other columns on rank {rank} than on rank 0, and each rank takes its part of "
                "the same batch: shuffle alike on all ranks, by the same torch.manual_seed inside the session or by "
                "generator=torch.Generator().manual_seed(0) of the DataLoader, and without a DistributedSampler."
            )
    raise Stopped("The optimizer's param groups differ between the ranks: add and change them on all ranks alike.")


# -- a batch that ranks share ----------------------------------------------------------------------------------------


def common_length(columns: Sequence[Any], passes: int) -> int:
    """Return the number of samples in every column; Mistake if they differ."""
    lengths = [length_of(column) for column in columns]
    if not columns or len(set(lengths)) > 1 or passes < 1:
        raise Mistake(
            f"micro_batches got columns of the lengths {lengths} and passes={passes}: expected one column or more, of "
            "the same length, and at least one pass."
        )
    return lengths[0]


def length_of(column: Any) -> int:
    """Return the number of samples in a column; Mistake if it cannot be sliced, or a dict has several lengths."""
    if isinstance(column, Mapping):
        lengths = {key: length_of(value) for key, value in column.items()}
        if len(set(lengths.values())) == 1:
            return next(iter(lengths.values()))
        raise Mistake(f"micro_batches got a dict of columns of the lengths {lengths}: expected one length for all.")
    try:
        column[0:0]
        return len(column)
    except (TypeError, IndexError, KeyError):
        raise Mistake(
            f"micro_batches got a {type(column).__name__} as a column: expected tensors, lists or indices of samples, "
            "each of the whole batch, or a dict of such."
        ) from None


def part_of(column: Any, start: int, stop: int) -> Any:
    if isinstance(column, Mapping):
        return {key: part_of(value, start, stop) for key, value in column.items()}
    return column[start:stop]


def parts_of(comm: Any, columns: tuple[Any, ...], length: int, parts: int) -> Iterator[tuple[Any, ...]]:
    """Yield what `micro_batches` returns, for columns of this length."""
    seed = int(torch.randint(2**62, ()))  # all ranks draw it
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        for part in range(comm.data_rank, parts, comm.data_size):
            start, stop = length * part // parts, length * (part + 1) // parts
            if start < stop:  # the mean of no sample would be NaN
                torch.default_generator.manual_seed(seed + part)
                if devices:
                    torch.cuda.manual_seed(seed + part)
                weight = (stop - start) * comm.data_size / length
                yield *(part_of(column, start, stop) for column in columns), weight


def digest_of_columns(columns: Sequence[Any]) -> int:
    """Return a digest of the columns of whole numbers and texts, or of all columns if there are none.

    Each rank may augment the images in another way; their labels or numbers tell whether they are the same.
    """
    exact = [part for part in map(_exact_bytes, columns) if part]
    if not exact:
        exact = [_bytes(column) for column in columns if torch.is_tensor(column)]
    return zlib.crc32(b"".join(exact)) % DIGEST


def _exact_bytes(column: Any) -> bytes:
    if isinstance(column, Mapping):
        return b"".join(map(_exact_bytes, column.values()))
    if torch.is_tensor(column):
        return b"" if column.is_floating_point() or column.is_complex() else _bytes(column)
    if hasattr(column, "tobytes"):  # of numpy
        return b"" if column.dtype.kind in "fcO" else column.tobytes()
    values = [value for value in column if isinstance(value, list) or _is_plain(value)]
    return repr(values).encode() if values else b""


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# -- at the start ----------------------------------------------------------------------------------------------------


def share(comm: Any, model: nn.Module, optimizer: Optimizer) -> None:
    """Give all ranks rank 0's weights, buffers, options and optimizer state; Stopped if their models differ."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = [
        *(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors),
        *(f"{name} is trained" for name, parameter in model.named_parameters() if parameter.requires_grad),
        *(f"{names[p]} in param group {k}" for k, group in enumerate(optimizer.param_groups) for p in group["params"]),
    ]
    first = comm.broadcast_object(mine, name="wrap/names")
    with comm.together("comm.wrap"):
        if mine != first:
            here, there = (next(iter(x for x in one if x not in other), "another order")
                           for one, other in ((mine, first), (first, mine)))  # fmt: skip
            raise Mistake(f"comm.wrap got another model or optimizer than on rank 0: {here}, there {there}.")
    _make_room(comm, optimizer)
    comm.broadcast_state(model, optimizer)


def _make_room(comm: Any, optimizer: Optimizer) -> None:
    """Give each rank's optimizer the entries of rank 0's state, for `broadcast_state` to fill."""
    parameters = parameters_of(optimizer)
    mine = [
        {key: (value.shape, value.dtype, value.is_cpu) for key, value in optimizer.state.get(parameter, {}).items()
         if torch.is_tensor(value)} for parameter in parameters
    ]  # fmt: skip
    for parameter, entries, own in zip(parameters, comm.broadcast_object(mine, name="wrap/state"), mine):
        if not entries:
            optimizer.state.pop(parameter, None)
        elif entries != own:
            optimizer.state[parameter] = {
                key: torch.empty(shape, dtype=dtype, device="cpu" if on_cpu else parameter.device)
                for key, (shape, dtype, on_cpu) in entries.items()
            }


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def broadcast_state(comm: Any, model: nn.Module, optimizer: Optimizer) -> None:
    """Make model and optimizer equal to rank 0's: scalars as an object, tensors in place. A collective.

    Parameters come last, so that nothing before can change them.
    """
    scalars, tensors = _optimizer_parts(model, optimizer)
    _refuse_other_state(comm, tensors)
    scalars = comm.broadcast_object(scalars, name="state/scalars")
    for group, values in zip(optimizer.param_groups, scalars["groups"]):
        group.update(values)
    for parameter, values in zip(parameters_of(optimizer), scalars["states"]):
        if values:
            optimizer.state[parameter].update(values)
    comm.broadcast_tensors(tensors, name="state/optimizer")
    comm.broadcast_model(model)


def _refuse_other_state(comm: Any, tensors: dict[str, Tensor]) -> None:
    """Raise Stopped on all ranks if one has other tensors than the first with its part of the model."""
    first: dict[int, set[str]] = {}
    all_names = comm.allgather_object((comm.model_rank, set(tensors)), name="state/names")
    for rank, (model_rank, names) in enumerate(all_names):
        differing = first.setdefault(model_rank, names) ^ names
        if differing:
            raise Stopped(
                f"rank {rank} has other optimizer state than rank {model_rank}, which differ in {min(differing)}: "
                "freeze the same parameters on all ranks before optim.init_state, as they were when it was saved."
            )


def _optimizer_parts(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter, {})
        states.append({key: value for key, value in state.items() if not torch.is_tensor(value)})
        tensors |= {f"{names[parameter]}/{key}": value for key, value in state.items() if torch.is_tensor(value)}
    return {"groups": groups, "states": states}, tensors


# -- batch norm ------------------------------------------------------------------------------------------------------


class Watch:
    """Compares the copies of a model in a user's own loop, and averages batch norm's statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0

    def compare(self, comm: Any, optimizer: Optimizer) -> None:
        """Before a step: all ranks raise Stopped if one holds other weights or optimizer state. A collective."""
        average_statistics(comm, self.model)
        if is_due(self.steps):
            buffers = dict(self.model.named_buffers())  # a rank's own, such as a queue of its images
            whole = named_tensors(self.model, optimizer)
            tensors = {name: value for name, value in whole.items() if torch.is_tensor(value) and name not in buffers}
            check_replicas(comm, tensors, place=f"step {self.steps}", remedy=REMEDY)
        self.steps += 1


def average_statistics(comm: Any, model: nn.Module) -> None:
    """Give batch norm's running statistics their mean over the ranks. A collective."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    buffers = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var) if buffer is not None]
    if not buffers or comm.data_size == 1:
        return
    mean = comm.allreduce(torch.cat([buffer.double() for buffer in buffers]), name="wrap/batch_norm") / comm.data_size
    for buffer, part in zip(buffers, mean.split([len(buffer) for buffer in buffers])):
        buffer.copy_(part)


# -- comparisons -----------------------------------------------------------------------------------------------------


REMEDY = (
    "Change weights and the optimizer's state on all ranks alike: load them before comm.wrap, which gives all ranks "
    "those of rank 0, or call comm.broadcast_state(model, optimizer) after it. If nothing but optimizer.step() changes "
    "them, a memory or a processor of such a host computes wrongly, or its processor is of another kind: leave the "
    "host out, or give comm.wrap watch=False."
)


def is_due(step: int) -> bool:
    return step % OFTEN == 0 if step > OFTEN else step & (step - 1) == 0


def check_replicas(comm: Any, tensors: dict[str, Tensor], *, place: str, remedy: str) -> None:
    """Compare the data ranks with the same part of the model; all ranks raise Stopped if one differs from most.

    place: where the run is. remedy: in sentences.
    """
    if found := differences(comm, tensors):
        clauses = [
            f"rank {one.rank} ({one.host}) and rank {one.good} hold other values of {one.tensor}, and only two ranks "
            "hold it, so that either may be wrong" if one.alone else
            f"rank {one.rank} ({one.host}) holds other values of {one.tensor} than most ranks"
            for one in found
        ]  # fmt: skip
        raise Stopped("; ".join(clauses) + f": found after {place}. {remedy}")


def named_tensors(
    model: nn.Module, optimizer: Optimizer | None = None, average: nn.Module | None = None
) -> dict[str, Tensor]:
    """Return parameters and buffers by name, in the same order on all ranks.

    The optimizer's tensors are called parameter/key; the average's have words before their name.
    """
    tensors = _held(model)
    if average is not None:
        tensors.update({f"the average of {name}": value for name, value in _held(average).items()})
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            tensors.update({f"{name}/{key}": value for key, value in state.items() if torch.is_tensor(value)})
    return tensors


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of a model, also tables of positions and attention masks, which are not saved."""
    return {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}


@dataclass(frozen=True)
class Difference:
    """A rank whose bits are not those of most ranks with the same part of the model."""

    rank: int
    host: str
    tensor: str  # the first one that differs
    good: int  # a rank that is as most are
    alone: bool  # only these two ranks have the part, so the wrong one may be either


def differences(comm: Any, tensors: dict[str, Tensor]) -> list[Difference]:
    """Return one entry for each rank whose tensors differ, the same on all ranks. A collective."""
    sums = bit_sums(tensors.values()).cpu()
    mine = comm.model_rank, socket.gethostname(), digest(sums)
    everyone = comm.allgather_object(mine, name="replicas/digest")
    bad = differing(everyone)
    if not any(bad):
        return []
    rows = comm.allgather_object(sums, name="replicas/sums")  # only now: they are long
    names = comm.allgather_object(list(tensors), name="replicas/names")
    found = []
    for rank, (part, host, _) in enumerate(everyone):
        if bad[rank]:
            same = [other for other, (its_part, _, _) in enumerate(everyone) if its_part == part]
            good = next(other for other in same if not bad[other])
            first = int((rows[rank] != rows[good]).nonzero()[0])
            found.append(Difference(rank, host, names[rank][first], good, alone=len(same) == 2))
    return found


def differing(everyone: list[tuple[int, str, str]]) -> list[bool]:
    """Return for each rank whether it differs from most with the same part; of a tie, the lowest rank counts."""
    usual = {part: mode(digest for p, _, digest in everyone if p == part) for part, _, _ in everyone}
    return [usual[part] != digest for part, _, digest in everyone]
