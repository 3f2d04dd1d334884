"""The block at the end of a run: its results, its files, and the commands that go on with it."""

import logging
import math
import shlex
import statistics
from pathlib import Path

import torch

from largebatch.config import TrainConfig, load
from largebatch.engine import Trainer
from largebatch.files.run_folder import Row, RunFolder, read_rows
from largebatch.flops import utilisation
from largebatch.report.history import Start, count, read_starts, write_end

logger = logging.getLogger(__name__)

COMMANDS = {
    "validate": "python -m largebatch.validate {best}",
    "fine-tune": "python -m largebatch.train --model {model} --init-from {best} --recipe finetune --data FOLDER",
    "report": "python -m largebatch.report {run}",
    "export": "python -m largebatch.export {best} FOLDER",
}


def log_end(config: TrainConfig, trainer: Trainer, reason: str) -> None:
    """Note the end of this process, and log the results of the run. reason: of an early end.

    The run has its last checkpoint, so a full disk must not let it fail now.
    """
    folder, device, share = Path(config.folder), trainer.device, None
    try:
        write_end(folder, step=trainer.state.step, reason=reason)
        if device.type == "cuda" and config.run.precision != "fp32" and not config.schedule.image_sizes:
            gpu = torch.cuda.get_device_name(device)
            share = utilisation(config.model.name, config.model.img_size, gpu=gpu, ranks=trainer.comm.size)
        logger.info("%s", describe(folder, num_steps=trainer.num_steps, mfu=share))
    except OSError as error:
        logger.warning("the end of the run cannot be told: %s", error)


def describe(folder: Path, *, num_steps: int, mfu: float | None = None) -> str:
    """Return the block for a run. mfu: the share of the devices' FLOP/s of one image per second, None if unknown."""
    run = RunFolder(folder)
    files = (run.config, run.log, run.steps, run.epochs, run.curves)
    steps, epochs, starts = read_rows(run.steps), read_rows(run.epochs), read_starts(folder)
    done = round(max([row["step"] for row in (*steps, *epochs)] + [start.last_step or 0 for start in starts]))
    lines = {
        "top-1": accuracy(epochs),
        "time": ", ".join(filter(None, (duration(starts, steps), speed(steps, mfu), memory(steps)))),
        "files": f"{folder}: {', '.join(file.name for file in files if file.exists())}, {run.checkpoints.name}",
        "resume": f"{starts[-1].command}, on any number of ranks" if done < num_steps and starts else "",
    }
    best = run.best if run.best.is_dir() else folder
    if best != folder:
        lines["weights"] = f"{best} is the checkpoint of the best evaluation; {folder} in its place, the newest"
    model = load(str(run.config)).model.name
    names = {"best": shlex.quote(str(best)), "run": shlex.quote(str(folder)), "model": model}
    lines |= {what: command.format(**names) for what, command in COMMANDS.items()}
    title = f"{folder}: {'complete, ' if done >= num_steps else ''}step {done} of {num_steps}"
    return "\n".join([title, *(f"    {what:<11}{line}" for what, line in lines.items() if line)])


def accuracy(epochs: list[Row]) -> str:
    """Return the last and the best top-1, also of averaged weights."""
    parts = []
    for column, what in (("top1", ""), ("ema_top1", "averaged weights: ")):
        rows = [row for row in epochs if math.isfinite(row.get(column, math.nan))]
        if rows:
            best = max(rows, key=lambda row: row[column])
            at = "the last" if best is rows[-1] else f"{best[column]:.2f} % after epoch {best['epoch']:.4g}"
            parts.append(f"{what}{rows[-1][column]:.2f} % after epoch {rows[-1]['epoch']:.4g}, best: {at}")
    return "; ".join(parts) or "no evaluation"


def duration(starts: list[Start], steps: list[Row]) -> str:
    """Return the hours of all starts; one without an end counts to the step from which the next went on, if any."""
    seconds = 0.0
    for number, start in enumerate(starts):
        ended = start.ended
        if ended is None:
            last = starts[number + 1].step if number + 1 < len(starts) else math.inf
            kept = [row["time"] for row in steps if row["step"] <= last and row.get("time", 0) > 0]
            ended = kept[-1] if kept else start.time
        seconds += max(0.0, (ended or start.time) - start.time)
    if not starts:
        return ""
    length = f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
    return f"{length} on {count(starts[-1].ranks, 'rank')}" + (f" in {len(starts)} starts" if len(starts) > 1 else "")


def speed(steps: list[Row], mfu: float | None) -> str:
    """Return the median of the images per second, and the utilisation (MFU) at that rate."""
    rates = [row["images_per_s"] for row in steps if math.isfinite(row.get("images_per_s", math.nan))]
    if not rates:
        return ""
    rate = statistics.median(rates)
    return f"{rate:.0f} img/s" + (f", MFU {100 * rate * mfu:.1f} % of the datasheet" if mfu else "")


def memory(steps: list[Row]) -> str:
    peaks = [row["memory_gib"] for row in steps if math.isfinite(row.get("memory_gib", math.nan))]
    return f"peak memory {max(peaks):.2f} GiB on rank 0" if peaks else ""
