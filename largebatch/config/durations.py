"""Turn texts and sizes of the config into numbers: images, passes, seconds, ranges of steps."""

import datetime
import math
import re

TIMED = ("--checkpoint.every",)  # options that may be given as a time, too
NEVER = "never"  # run.eval_every without evaluations
SECONDS = {"second": 1, "minute": 60, "hour": 3600}


def duration_images(text: str, *, option: str, num_samples: int, batch_size: int, run_images: int = 0) -> int:
    """Turn "300 epochs", "500 steps", "1e6 images" or "5 %" (of the run) into a number of images.

    num_samples: images of an epoch. batch_size: images of a step. run_images: images of the run, for a percentage.
    """
    match = re.fullmatch(r"\s*([0-9.eE+]+)\s*(epoch|step|image|%)s?\s*", text)
    try:
        count = float(match[1]) if match else math.nan
    except ValueError:
        count = math.nan
    if not match or math.isnan(count) or (match[2] == "%" and not run_images):
        units = "epochs, steps or images" + (" or %" if run_images else "")
        units += ", or seconds, minutes or hours" if option in TIMED else ""
        raise ValueError(f"{option} is {text!r}: expected a number and a unit ({units}), such as '5 epochs'.")
    unit = {"epoch": num_samples, "step": batch_size, "image": 1, "%": run_images / 100}[match[2]]
    return math.ceil(round(count * unit, 6))


def duration_seconds(text: str) -> float | None:
    """Turn "90 seconds", "10 minutes" or "1.5 hours" into seconds; None for another text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(second|minute|hour)s?\s*", text)
    return float(match[1]) * SECONDS[match[2]] if match else None


def epoch_seconds(value: float | str, *, option: str) -> float:
    """Return a time as seconds since the epoch; ISO 8601 without a zone is local time."""
    try:
        if isinstance(value, str) and not re.fullmatch(r"[0-9.]+", value):
            return datetime.datetime.fromisoformat(value).timestamp()
        return float(value)
    except ValueError:
        raise ValueError(
            f"{option} is {value!r}: expected seconds since the epoch, or a time such as 2026-11-21T18:00."
        ) from None


def profiled_steps(text: str) -> tuple[int, int] | None:
    """Return the first and the last step of run.profile_steps; None if it is empty."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not text:
        return None
    if not match or not 1 <= int(match[1]) < int(match[2]):
        raise ValueError(
            f"--run.profile_steps is {text!r}: expected a:b with 1 <= a < b, such as 10:13 for steps 10, 11 and 12."
        )
    return int(match[1]), int(match[2]) - 1


def accumulation_passes(
    *, global_batch_size: int, micro_batch_size: int, num_ranks: int, resuming: bool = False
) -> int:
    """Return the largest number of micro-batches of a rank in a step; other ranks may have one fewer.

    ValueError if the batch is not a whole number of micro-batches, or, unless resuming, if a rank has none.
    """
    count, rest = divmod(global_batch_size, micro_batch_size)
    if count and not rest and (resuming or count >= num_ranks):
        return math.ceil(count / num_ranks)
    nearest = nearest_batches(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, num_ranks=num_ranks
    )
    raise ValueError(
        f"A global batch of {global_batch_size} is not a whole number of passes of {num_ranks} ranks × micro-batch "
        f"{micro_batch_size} (= {num_ranks * micro_batch_size}); set --data.global_batch_size and "
        f"--data.micro_batch_size, nearest exact: {nearest}."
    )


def nearest_batches(*, global_batch_size: int, micro_batch_size: int, num_ranks: int) -> str:
    """Describe the nearest global batches of which every rank computes the same number of passes."""
    found = exact_batches(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, num_ranks=num_ranks)
    return ", or ".join(
        f"{num_ranks * micro * passes} = {num_ranks} ranks × {micro} micro-batch × {passes} passes"
        for micro, passes in found
    )


def exact_batches(*, global_batch_size: int, micro_batch_size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return (micro-batch, passes) of the nearest batches; first the batch itself, if a micro-batch makes it exact."""
    found: list[tuple[int, int]] = []
    share, rest = divmod(global_batch_size, num_ranks)
    most = min(micro_batch_size, share)
    if share and not rest:
        micro = next(micro for micro in range(most, 0, -1) if share % micro == 0)
        found = [(micro, share // micro)]
    if not found or 2 * found[0][0] < most:
        passes = max(1, math.ceil(global_batch_size / (micro_batch_size * num_ranks)))
        below = int(global_batch_size / (num_ranks * passes)) // 4 * 4  # kernels are faster with aligned sizes
        found += [(micro, passes) for micro in (below, below + 4) if micro]
    return found
