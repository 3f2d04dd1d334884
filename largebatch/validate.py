"""Exact top-1 and top-5 of a run or of a zoo model; every held-out image is counted once, at any number of ranks.

python -m largebatch.validate RUN [--ema] [--section.option value ...]
horovodrun -np 4 python -m largebatch.validate --model vit_b16 --init-from FILE --data FOLDER

--ema takes the averaged weights of a run that was trained with --optim.ema_half_life.
"""

import sys
from pathlib import Path
from typing import Sequence

from largebatch import checkpoint
from largebatch.build import build_eval_loader, build_model, open_data, program, set_up
from largebatch.comm import Communicator
from largebatch.config import TrainConfig, parse
from largebatch.engine import evaluate
from largebatch.recipes import choose

EMA = "--ema"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    ema = EMA in argv
    with program(lambda: read([word for word in argv if word != EMA], ema=ema)) as (config, comm):
        metrics = validate(config, comm, ema=ema)
        if comm.rank == 0:
            print(
                f"top-1 {metrics['top1']:.2f} %  top-5 {metrics['top5']:.2f} %  loss {metrics['loss']:.4f}  "
                f"images {metrics['images']:.0f}  ({config.model.weights})"
            )


def read(argv: list[str], *, ema: bool = False) -> TrainConfig:
    """The config of the run folder that comes first, if one does, with the options on top.

    model.weights is empty if the newest ones of the run are meant, averaged if `ema`.
    """
    run = Path(argv.pop(0)) if argv and not argv[0].startswith("-") else None
    if run and not (run / "config.yaml").is_file():
        raise ValueError(
            f"{run} is no run folder: expected a config.yaml in it; give the --run.folder of a training run."
        )
    if run:
        argv = ["--config", str(run / "config.yaml"), "--run.folder", str(run), "--model.weights=", *argv]
    config = parse(argv, choose_recipe=choose, prog="python -m largebatch.validate", description=__doc__)
    if not run and not config.model.weights:
        raise ValueError("There is nothing to validate: give a run folder, or --model, --init-from FILE and --data.")
    if ema and config.model.weights:
        raise ValueError(f"{EMA} and --init-from both choose weights: expected one; averages are files like any other.")
    if ema and not config.optim.ema_half_life:
        raise ValueError(f"{EMA} finds no averaged weights: {run} was trained without --optim.ema_half_life.")
    return config


def validate(config: TrainConfig, comm: Communicator, *, ema: bool = False) -> dict[str, float]:
    """Evaluate config.model on the held-out images of config.data; see `engine.evaluate` for what comes back.

    Without config.model.weights: those of the newest checkpoint in the run folder, or their average.
    """
    device = set_up(config, comm)
    with comm.together("looking for weights"):
        if comm.rank == 0 and not config.model.weights:
            config.model.weights = str(checkpoint.newest_weights(config.folder, average=ema))
    config.model.weights = comm.broadcast_object(config.model.weights, name="validate/weights")
    held_out = open_data(config, comm, "validation")
    with comm.together("building"):
        model = build_model(config, device)
        batches = build_eval_loader(config, comm, model=model, index=held_out, device=device)
    return evaluate(model, batches, comm=comm, device=device, precision=config.run.precision)


if __name__ == "__main__":
    main()
