r"""Learning-rate schedules: pure functions from the optimizer step to a factor of the peak learning rate.

The engine writes `group["lr"] = peak * factor(step)` at the top of every step, so a resumed run needs one integer. In a
batch ramp the unit of durations is the first step: a larger step may begin at a fraction.

    factor
      1 |        ______ peak
        |      /        \            linear, cosine or constant between warm-up and cooldown
        |    /             \
  start |  /                  \   floor |                        \__________
        +--|-----|----------------|----------|--> step
           0     warmup_steps     end        total_steps        end = total_steps - cooldown_steps

Without a `start` the warm-up is (step + 1) / (warmup_steps + 1), which is above zero. With linear decay,
(end - step) / (end - warmup_steps), and `steps_per_epoch`, this is the schedule of the published 32K run.
"""

import math
from collections.abc import Callable

Schedule = Callable[[float], float]

# The decay from 1 to 0, or none, as a function of the progress through it, from 0 to 1.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,  # until the cooldown
}


def make_schedule(
    name: str,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    start: float | None = None,
    floor: float = 0.0,
    cooldown_steps: int = 0,
    prefix: bool = True,
    steps_per_epoch: float | None = None,
    late: int = 0,
) -> Schedule:
    """Return the factor of the peak learning rate as a function of the optimizer step, from 0.

    Args:
        name: linear, cosine or constant.
        total_steps: length of the run, warm-up and cooldown included; later steps keep the last value.
        start: factor at step 0 of a warm-up.
        floor: factor at the end of the decay and during the cooldown.
        cooldown_steps: steps at the floor; after a constant rate, steps of linear decay to it.
        prefix: the decay begins after the warm-up; if false, at step 0, as in timm and the published VOLO runs.
        steps_per_epoch: hold the factor during an epoch; may be fractional, as global batches straddle epochs.
        late: epochs by which the factor is behind, as DeiT's code sets the rate after an epoch for that epoch.

    ValueError for an unknown name, a value out of range, or an argument that this schedule would not use.
    """
    _check_shape(name, floor=floor, cooldown_steps=cooldown_steps)
    _check_durations(total_steps, warmup_steps, cooldown_steps, steps_per_epoch)
    _check_warmup(start, floor, warmup_steps)
    shape = SHAPES[name]
    warmup = _in_epochs(warmup_steps, steps_per_epoch)
    end, last = (_in_epochs(steps, steps_per_epoch) for steps in (total_steps - cooldown_steps, total_steps))
    first = 1.0 / (warmup + 1.0) if start is None else start
    offset = warmup if prefix else 0.0

    def factor(step: float) -> float:
        assert step >= 0, f"optimizer steps start at 0, got {step}"
        time = max(0, math.floor(step / steps_per_epoch + 1e-9) - late) if steps_per_epoch else step  # 1e-9: rounding
        if time < warmup:
            return first + (1.0 - first) * time / warmup
        if time >= end and name == "constant":
            return floor + (1.0 - floor) * max(0.0, (last - time) / (last - end)) if cooldown_steps else 1.0
        if time >= end:
            return floor
        return floor + (1.0 - floor) * shape((time - offset) / (end - offset))

    return factor


def scale_lr(lr: float, *, batch_size: int, reference_batch_size: int, rule: str = "none") -> float:
    """Scale a learning rate that was tuned at `reference_batch_size`.

    The linear rule is for SGD (arXiv:1706.02677), the square-root rule for Adam and LAMB (arXiv:1904.00962).
    """
    rules = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
    if rule not in rules:
        raise ValueError(f"unknown learning-rate rule {rule!r}; choose one of {', '.join(rules)}")
    if batch_size < 1 or reference_batch_size < 1:
        raise ValueError(
            f"batch sizes must be positive to scale a learning rate, "
            f"got batch_size={batch_size} and reference_batch_size={reference_batch_size}"
        )
    return lr * (batch_size / reference_batch_size) ** rules[rule]


def _in_epochs(steps: int, steps_per_epoch: float | None) -> float:
    """Convert a duration to epochs if the schedule moves once per epoch."""
    if steps_per_epoch is None:
        return float(steps)
    epochs = steps / steps_per_epoch
    # The caller has rounded 150 epochs of 39.1 steps to whole steps; give back the whole number of epochs.
    whole = abs(epochs - round(epochs)) * steps_per_epoch < 1.0
    return float(round(epochs)) if whole else epochs


def _check_shape(name: str, *, floor: float, cooldown_steps: int) -> None:
    if name not in SHAPES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(SHAPES)}")
    if name == "constant" and floor and not cooldown_steps:
        raise ValueError(
            f"--schedule.floor is {floor} and --schedule.name constant: give a --schedule.cooldown, or leave it out."
        )


def _check_durations(total: int, warmup: int, cooldown: int, steps_per_epoch: float | None) -> None:
    if total < 1 or warmup < 0 or cooldown < 0:
        raise ValueError(
            f"a schedule needs total_steps >= 1, warmup_steps >= 0 and cooldown_steps >= 0, "
            f"got {total}, {warmup} and {cooldown}"
        )
    if warmup + cooldown > total:
        raise ValueError(
            f"warmup_steps + cooldown_steps = {warmup} + {cooldown} is longer than total_steps = {total}; "
            f"shorten them or train longer"
        )
    if steps_per_epoch is not None and steps_per_epoch <= 0:
        raise ValueError(f"steps_per_epoch must be above 0, got {steps_per_epoch}")


def _check_warmup(start: float | None, floor: float, warmup_steps: int) -> None:
    if start is not None and not warmup_steps:
        raise ValueError(f"--schedule.start is {start}, without a warm-up: give a --schedule.warmup, or leave it out.")
    for option, value in (("start", start), ("floor", floor)):
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"--schedule.{option} is {value}: expected a share of --optim.lr, 0 to 1.")
