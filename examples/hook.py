"""A hook of your own in the training of largebatch: the run ends when the accuracy has stopped to rise.

    horovodrun -np 2 python examples/hook.py --model vit_nano32 --run.folder runs/hook

The command takes every option of `python -m largebatch.train`. largebatch/engine.py draws the loop with all its events.
"""

import sys

import largebatch
from largebatch.ranks.mistakes import report_mistakes
from largebatch.train import read

PATIENCE = 2  # evaluations


class EndWhenFlat(largebatch.Hook):
    """Ends the run after PATIENCE evaluations without a better top-1.

    Every rank has the same metrics, so all ranks decide alike. A hook that saw other values on each rank would have to
    exchange them first: `trainer.comm`.
    """

    def __init__(self) -> None:
        self.best, self.worse = 0.0, 0  # in percent

    def after_evaluate(self, trainer: largebatch.Trainer, metrics: dict[str, float]) -> None:
        """Count the evaluations since the best one."""
        self.worse = 0 if metrics["top1"] > self.best else self.worse + 1
        self.best = max(self.best, metrics["top1"])
        if self.worse == PATIENCE:
            trainer.stop_reason = f"top-1 was not above {self.best:.1f} % in {PATIENCE} evaluations"


with report_mistakes():  # a mistake is one sentence and exit code 2
    config = read(sys.argv[1:])
with largebatch.session(config) as comm:
    trainer = largebatch.build_trainer(config, comm)
    trainer.hooks = [EndWhenFlat(), *trainer.hooks]
    reason = trainer.fit(max_steps=config.run.max_steps)
    if comm.rank == 0:
        print(f"step {trainer.state.step} of {trainer.num_steps}; {reason or 'complete'}")
