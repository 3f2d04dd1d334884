"""Find how far the batch of a run can grow, by branches from a checkpoint; no weights are saved.

    horovodrun -np 4 python -m largebatch.find_batch RUN [--images N] [--section.option value ...]
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# Other imports take seconds, as in `train`.
from largebatch import train
from largebatch.arguments import expanded, take_flags
from largebatch.files.run_folder import RunFolder
from largebatch.process.garbage import gc_resume
from largebatch.ranks.mistakes import report_mistakes
from largebatch.ranks.signals import Signals

if TYPE_CHECKING:
    from largebatch.config import TrainConfig
    from largebatch.ranks import Ranks

ABOUT = """\
Find how far the batch can grow: largebatch find_batch RUN [--images N] [--section.option value ...]

RUN is the folder of a run, whose newest checkpoint is taken, or a checkpoint, such as RUN/checkpoints/00001000. From
there, branches train at 1, 2, 4, 8 ... times the global batch, each over the same N images and in 50 steps or more,
until the loss ends above that of the run's own batch. Without --images, N is 50 steps of 8 times the batch. The log
has the result, and RUN gets find_batch.csv and find_batch.png, but no weights.
"""


def main(argv: Sequence[str] | None = None) -> None:
    with report_mistakes():
        words, place, num_images = read(sys.argv[1:] if argv is None else argv)
    work = partial(search, place=place, num_images=num_images)
    train.main(words, about=ABOUT, work=work, log_file=False)


def read(argv: Sequence[str]) -> tuple[list[str], Path | None, int]:
    """Return the words for `train`, the run or checkpoint that was given, and --images, 0 without it."""
    flags, words = take_flags(argv, ["--images N"])
    place = Path(expanded(words.pop(0))) if words and not words[0].startswith("-") else None
    if place:
        run = RunFolder.of(place).check()
        words = ["--config", str(run.config), "--run.folder", str(run.path), *words]
    try:
        num_images = int(float(flags["images"] or 0))
    except (ValueError, OverflowError):
        num_images = -1
    if num_images < bool(flags["images"]):
        raise ValueError(f"--images is {flags['images']!r}: expected a number of images, such as 400000 or 4e5.")
    return words, place, num_images


def search(
    argv: Sequence[str], config: "TrainConfig", comm: "Ranks", signals: Signals, *, place: Path | None, num_images: int
) -> None:
    from largebatch.batch_search import find_batch
    from largebatch.ranks import preflight

    preflight.agree(comm, {"images": num_images})
    step = comm.from_rank_0(lambda: newest_step(place or Path(config.folder)), phase="looking for a checkpoint")
    config, device, images = train.prepare_images(config, comm)
    gc_resume()
    find_batch(config, comm, signals, device=device, images=images, step=step, num_images=num_images)


def newest_step(place: Path) -> int:
    from largebatch import checkpoint

    if not checkpoint.is_checkpoint(place) and not checkpoint.checkpoints(place):
        raise ValueError(
            f"{place} has no checkpoint, and the branches begin at one: give a run that has saved one, or a "
            "checkpoint such as RUN/checkpoints/00001000."
        )
    return int(checkpoint.newest_weights(place).parent.name)


if __name__ == "__main__":
    main()
