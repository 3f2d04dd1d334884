"""From a command line to ranks that run the same program, each on a device of its own."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from largebatch.comm import Communicator, preflight, session
from largebatch.comm.placement import check_placement
from largebatch.config import TrainConfig, options
from largebatch.precision import choose_precision, computes

logger = logging.getLogger(__name__)


@contextmanager
def program(read: Callable[[], TrainConfig]) -> Iterator[tuple[TrainConfig, Communicator]]:
    """Read a command line and start the ranks. A mistake in it is the same on all of them: it is said once."""
    config, mistake = TrainConfig(), None
    try:
        config = read()
    except ValueError as error:
        mistake = error
    run, shape = config.run, config.parallel.shape()
    with session(deterministic=run.deterministic, horovod=config.horovod, shape=shape) as comm:
        with comm.together("command line"):
            if mistake:
                raise mistake
        yield config, comm


def set_up_torch(config: TrainConfig) -> None:
    """Choose repeatable kernels, if they are asked for."""
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums only with this
        torch.use_deterministic_algorithms(True)


def set_up(config: TrainConfig, comm: Communicator) -> torch.device:
    """The device of this rank, after all ranks were found to run the same program on devices of their own.

    A precision of auto is replaced in `config` by what it means on the device, the same on all ranks.
    """
    with comm.together("set-up"):
        device = comm.device(config.run.device)
        set_up_torch(config)
    if config.run.precision == "auto":
        config.run.precision = choose_precision(device)  # type: ignore[assignment]
    elif comm.rank == 0 and not computes(device, config.run.precision):
        logger.warning(
            "--run.precision is %s, for which this %s has no instructions: it will be very slow, and auto would be %s.",
            config.run.precision,
            device.type,
            choose_precision(device),
        )
    logger.info("%s", preflight.agree(comm, options(config)))
    for line in check_placement(comm, device, loader_threads=config.data.num_threads):
        logger.info("%s", line)
    return device
