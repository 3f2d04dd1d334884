"""The batch ramp of a run, --schedule.batch_ramp: phases in which the global batch grows.

    1024@0,4096@10 epochs,32768@50 epochs    phases, each with its batch and the place where it begins
    1024@0,noise                             from 1024 on, twice the batch whenever the noise scale exceeds it

A phase begins with the first step at its place or later: no step is cut, and the order of images does not change. The
last batch is data.global_batch_size, on which memory, rates and durations in steps depend.
"""

import math
import re
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from largebatch.config.durations import accumulation_passes, duration_images, nearest_batches
from largebatch.config.sections import TrainConfig

OPTION = "--schedule.batch_ramp"
FORM = f"{OPTION} is {{!r}}: expected phases such as '1024@0,4096@10 epochs,32768@50 epochs', or '1024@0,noise'"
NOISE = "noise"
IN_STEPS = (  # options that are a number of images of the run
    *("run.duration", "schedule.warmup", "schedule.cooldown", "optim.ema_half_life"),
    "optim.second_moment_half_life",
)


class Ramp(NamedTuple):
    """The batches of the phases, and the places where they begin; by_noise: the run decides all but the first."""

    batches: tuple[int, ...]
    places: tuple[str, ...]
    by_noise: bool


def parse(text: str) -> Ramp:
    """Return the ramp of a text; ValueError for another text, or a first place that is not 0."""
    *phases, last = text.split(",")
    by_noise = last.strip() == NOISE
    pairs = read_phases(text, phases if by_noise else [*phases, last], option=OPTION, form=FORM)
    if by_noise and len(pairs) > 1:
        raise ValueError(f"{FORM.format(text)}.")
    batches, places = zip(*pairs)
    return Ramp(batches, places, by_noise)


def read_phases(text: str, parts: list[str], *, option: str, form: str) -> list[tuple[int, str]]:
    """Return the number and the place of each phase of an option; ValueError for another text, or a first place not 0.

    form: a sentence about the text.
    """
    found = [re.fullmatch(r"\s*([1-9]\d*)\s*@\s*(.+?)\s*", part) for part in parts]
    pairs = [(int(match[1]), match[2]) for match in found if match]
    if not pairs or len(pairs) < len(found):
        raise ValueError(f"{form.format(text)}.")
    number, place = pairs[0]
    if place != "0":
        raise ValueError(f"{option} is {text!r}: its first phase is at {place}, expected '{number}@0'.")
    return pairs


def check(config: TrainConfig) -> None:
    """Raise ValueError for a ramp that fits no data and no global batch."""
    text = config.schedule.batch_ramp
    if not text:
        return
    ramp = parse(text)
    for place in ramp.places:
        images_at(text, place, 10**6, 10**6)
    for before, batch in pairwise(ramp.batches):
        if batch <= before:
            raise ValueError(f"{OPTION} is {text!r}: {batch} comes after {before}, expected a larger batch.")
    for option in IN_STEPS:
        if "step" in (given := attrgetter(option)(config)):
            raise ValueError(
                f"--{option} is {given!r} and {OPTION} {text!r}: the steps of a ramp differ in length, so give epochs, "
                "images or %."
            )
    if ramp.by_noise and config.parallel.shape().size > 1:
        raise ValueError(
            f"{OPTION} is {text!r} and --parallel {config.parallel.shape()}: no rank has the gradient of a whole "
            "model, by which the noise scale is measured; give places instead of noise."
        )
    if ramp.by_noise and config.augment.repeats > 1:
        raise ValueError(
            f"{OPTION} is {text!r} and --augment.repeats {config.augment.repeats}: micro-batches that share images do "
            "not show the noise; give places instead of noise."
        )


def check_batches(config: TrainConfig, *, num_ranks: int, resuming: bool) -> None:
    """Raise ValueError for batches that do not fit the global batch, the micro-batch or, unless resuming, the ranks."""
    text, batch, micro = config.schedule.batch_ramp, config.data.global_batch_size, config.data.micro_batch_size
    if not text:
        return
    ramp = parse(text)
    if not ramp.by_noise and ramp.batches[-1] != batch:
        raise ValueError(
            f"{OPTION} is {text!r} and --data.global_batch_size {batch}: expected a ramp that ends at the global "
            "batch, so change one of the two."
        )
    for size in ramp.batches:
        exact: dict[str, int] = {"global_batch_size": size, "micro_batch_size": micro, "num_ranks": num_ranks}
        try:
            accumulation_passes(**exact, resuming=resuming)
        except ValueError:
            raise ValueError(
                f"{OPTION} is {text!r}: its batch of {size} is not a whole number of micro-batches of {micro}, at "
                f"least one for each of {num_ranks} ranks; nearest exact: {nearest_batches(**exact)}."
            ) from None
    if ramp.by_noise and not 2 * micro <= ramp.batches[0] < batch:
        raise ValueError(
            f"{OPTION} is {text!r}: expected a first batch from {2 * micro}, two micro-batches, by which the noise "
            f"scale is measured, to less than --data.global_batch_size {batch}."
        )


def by_noise(config: TrainConfig) -> bool:
    return bool(config.schedule.batch_ramp) and parse(config.schedule.batch_ramp).by_noise


def batches(config: TrainConfig) -> tuple[int, ...]:
    """Return the global batches in their order; of a ramp by noise, the first and the last."""
    if not config.schedule.batch_ramp:
        return (config.data.global_batch_size,)
    first = parse(config.schedule.batch_ramp).batches
    return (*first, config.data.global_batch_size) if by_noise(config) else first


def phases(config: TrainConfig, *, num_samples: int, run_images: int) -> tuple[tuple[int, int], ...]:
    """Return the first image and the batch of each phase, for `data.order.Plan`; ValueError for a phase without steps.

    num_samples: images of an epoch. run_images: images of the run.
    """
    text = config.schedule.batch_ramp
    if not text:
        return ()
    ramp, found = parse(text), [(0, batches(config)[0])]
    for batch, place in zip(ramp.batches[1:], ramp.places[1:]):
        start, before = found[-1]
        wanted = images_at(text, place, num_samples, run_images)
        if wanted <= start:
            raise ValueError(
                f"{OPTION} is {text!r}: the phase of {batch} is to begin at image {wanted}, and the one before it "
                f"begins at image {start}, as steps are not cut: leave one of the two out, or move it."
            )
        found.append((start + math.ceil((wanted - start) / before) * before, batch))
    if found[-1][0] >= run_images:
        raise ValueError(
            f"{OPTION} is {text!r}: the phase of {found[-1][1]} begins at image {found[-1][0]}, and --run.duration "
            f"{config.run.duration!r} ends at image {run_images}: leave the phase out, move it, or train longer."
        )
    return tuple(found)


def images_at(
    text: str, place: str, num_samples: int, run_images: int, *, option: str = OPTION, form: str = FORM
) -> int:
    """Return the images before a place of an option."""
    if place == "0":
        return 0
    if "step" in place:
        raise ValueError(
            f"{option} is {text!r}: steps may differ in length, so give its places in epochs, images or %."
        )
    try:
        return duration_images(place, option=option, num_samples=num_samples, batch_size=1, run_images=run_images)
    except ValueError:
        raise ValueError(f"{form.format(text)}; {place!r} is no number of epochs, images or %.") from None
