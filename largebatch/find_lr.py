"""Search a learning rate: some 200 steps at a growing rate, a suggestion, and no weights.

    horovodrun -np 4 python -m largebatch.find_lr --model vit_b32 [--data FOLDER] [--section.option value ...]
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

# Other imports take seconds, as in `train`.
from largebatch import train
from largebatch.process.garbage import gc_resume
from largebatch.ranks.signals import Signals

if TYPE_CHECKING:
    from largebatch.config import TrainConfig
    from largebatch.ranks import Ranks

ABOUT = """\
Search a learning rate: largebatch find_lr [--model NAME] [--data FOLDER] [--section.option value ...]

The options are those of largebatch train. Some 200 steps at a growing rate, from the initial state, at the global batch
and image size of the run, or those of its last phase; the log has a suggestion, and the run folder gets find_lr.csv and
find_lr.png, but no weights.
"""


def main(argv: Sequence[str] | None = None) -> None:
    train.main(argv, about=ABOUT, work=search)


def search(argv: Sequence[str], config: "TrainConfig", comm: "Ranks", signals: Signals) -> None:
    from largebatch import checkpoint
    from largebatch.rate_search import find_lr

    with comm.together("search"):
        if comm.rank == 0 and checkpoint.checkpoints(config.folder):
            raise ValueError(
                f"--run.folder is {config.folder}, which has checkpoints of a run: a search begins from the initial "
                "state, so choose another folder."
            )
    config, device, images = train.prepare_images(config, comm)
    gc_resume()
    find_lr(config, comm, signals, device=device, images=images)


if __name__ == "__main__":
    main()
