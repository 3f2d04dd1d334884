"""Start the ranks, and make sure that all run the same program, each on its own device."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from largebatch.config import TrainConfig, dropping, options, without_effect
from largebatch.config.checks import check
from largebatch.precision import choose_precision, computes
from largebatch.process.shared_memory import remove_leftovers
from largebatch.ranks import Ranks, preflight
from largebatch.ranks.placement import check_placement

logger = logging.getLogger(__name__)


def set_up(config: TrainConfig, comm: Ranks, *, final: bool = True) -> tuple[TrainConfig, torch.device]:
    """Check that all ranks run the same program, each on its own device; return the resolved config and the device.

    final: the config will not change any more, so doubtful options are logged.
    """
    with comm.together("set-up"):
        device = comm.device(config.run.device)
        if config.run.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums only with this
            torch.use_deterministic_algorithms(True)
        config = resolve(config, device)
    if final:
        warn_of_doubtful(config, device, comm)
    logger.info("%s; ranks: %s", preflight.agree(comm, options(config)), comm.kind)
    if comm.local_rank == 0:
        _remove_leftovers()
    for line in check_placement(comm, device, loader_threads=config.data.num_threads):
        logger.info("%s", line)
    return config, device


def warn_of_doubtful(config: TrainConfig, device: torch.device, comm: Ranks) -> None:
    if comm.rank == 0:
        for line in doubtful(config, device, data_size=comm.data_size):
            logger.warning("%s", line)


def doubtful(config: TrainConfig, device: torch.device, *, data_size: int) -> Iterator[str]:
    """Yield a sentence for each option that is allowed but hardly meant."""
    if not computes(device, config.run.precision):
        yield (
            f"--run.precision is {config.run.precision}, for which this {device.type} has no instructions: it will be "
            f"very slow, and auto would be {choose_precision(device)}."
        )
    yield from without_effect(config)
    shape = config.parallel.shape()
    if shape.size > 1 and (rates := dropping(config)):
        yield (
            f"{', '.join(rates)} and --parallel {shape}: ranks that share a model may draw other masks than a rank "
            "with a whole one, so a run that is shared otherwise has other numbers; those of this run repeat."
        )
    # This is no error: an elastic run may go on with one rank. With offload the state still moves to the host.
    if config.parallel.zero == 1 and data_size == 1:
        yield (
            "--parallel.zero is 1, and there is 1 data rank, which keeps the whole state of the optimizer: start more "
            "ranks, or leave it out."
        )


def _remove_leftovers() -> None:
    try:
        if leftovers := remove_leftovers():
            logger.info("removed %d files of shared memory that killed jobs had left in /dev/shm", len(leftovers))
    except OSError as error:  # no /dev/shm, or another job of this user is removing the same files
        logger.debug("shared memory is not cleared: %s", error)


def resolve(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Replace precision "auto" by that of the device; ValueError for an option that the device cannot keep."""
    if config.run.recompute and device.type == "cuda" and not config.run.deterministic:
        raise ValueError(
            f"--run.recompute is {config.run.recompute!r}: it compares bits, and a GPU adds up in any order; set "
            "--run.deterministic true as well, or leave it out."
        )
    if config.run.precision != "auto":
        return config
    precision = choose_precision(device)
    config = replace(config, run=replace(config.run, precision=precision))  # type: ignore[arg-type]  # one of its texts
    check(config)  # the choice may contradict other options
    return config
