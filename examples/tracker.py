"""A tracker of your own in the training of largebatch: each row of numbers as a line of JSON.

    horovodrun -np 2 python examples/tracker.py --model vit_nano32 --run.folder runs/tracker
"""

import json
import sys
from collections.abc import Mapping

import largebatch
from largebatch.hooks import Log, Tracker
from largebatch.ranks.mistakes import report_mistakes
from largebatch.train import read


class Lines(Tracker):
    """Prints the numbers. It runs on rank 0 alone, so it cannot communicate."""

    def add(self, numbers: Mapping[str, float], row: Mapping[str, float]) -> None:
        print(json.dumps({"step": int(row["step"])} | dict(numbers)))


with report_mistakes():
    config = read(sys.argv[1:])
with largebatch.session(config) as comm:
    trainer = largebatch.build_trainer(config, comm)
    (log,) = [hook for hook in trainer.hooks if isinstance(hook, Log)]
    log.sinks = [*log.sinks, Lines()]
    trainer.fit(max_steps=config.run.max_steps)
