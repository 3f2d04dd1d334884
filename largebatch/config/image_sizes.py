"""The image sizes of a run, --schedule.image_sizes: phases in which training images grow to model.img_size.

    128@0,192@30 %,224@80 %    phases, each with the side of its images in pixels and the place where it begins

A phase begins with the first step at its place or later. The order of images does not change. Evaluations have
model.img_size.
"""

from itertools import pairwise

from largebatch.config.ramp import images_at, read_phases
from largebatch.config.sections import TrainConfig

OPTION = "--schedule.image_sizes"
FORM = f"{OPTION} is {{!r}}: expected phases such as '128@0,192@30 %,224@80 %'"


def check(config: TrainConfig) -> None:
    """Raise ValueError for phases that do not grow to the image size, or that the rest of the config does not allow."""
    text, last = config.schedule.image_sizes, config.model.img_size
    if not text:
        return
    sizes = phases(config, num_samples=10**6, run_images=10**6, places=False)
    for (_, before), (_, size) in pairwise(sizes):
        if size <= before:
            raise ValueError(f"{OPTION} is {text!r}: {size} comes after {before}, expected a larger size.")
    if sizes[-1][1] != last:
        raise ValueError(
            f"{OPTION} is {text!r} and --model.img_size {last}: expected sizes that end at the image size, so change "
            "one of the two."
        )
    if (shape := config.parallel.shape()).size > 1:
        raise ValueError(f"{OPTION} is {text!r} and --parallel {shape}: ranks share images of one size; leave one out.")


def phases(
    config: TrainConfig, *, num_samples: int, run_images: int, places: bool = True
) -> tuple[tuple[int, int], ...]:
    """Return the first image and the size of each phase; ValueError for a phase that begins before the last one.

    num_samples: images of an epoch. run_images: images of the run. places: check them.
    """
    text = config.schedule.image_sizes
    if not text:
        return ((0, config.model.img_size),)
    pairs = read_phases(text, text.split(","), option=OPTION, form=FORM)
    found = [
        (images_at(text, place, num_samples, run_images, option=OPTION, form=FORM), size) for size, place in pairs
    ]
    for (before, _), (start, size) in pairwise(found):
        if places and not before < start < run_images:
            raise ValueError(
                f"{OPTION} is {text!r}: the phase of {size} px is to begin at image {start}, the one before it at "
                f"image {before}, and the run ends at image {run_images}: move it, or leave it out."
            )
    return tuple(found)
