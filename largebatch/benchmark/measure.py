"""The instrument: contenders take turns in one run, and the result is a ratio of their times.

Absolute times mean little on a shared machine. So every round runs each contender once, in an order that is reversed
every time, and the ratio of two is the median of their ratios round by round. Before that, each contender runs alone to
measure the memory that it adds, and all run once to warm up.
"""

import argparse
import ctypes
import datetime
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from largebatch.files.table import write_table
from largebatch.process.packages import versions as installed

Round = Callable[[], None]
PACKAGES = ("timm", "horovod", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "apex")


@dataclass(frozen=True)
class Contender:
    name: str
    open: Callable[[], AbstractContextManager[Round]]


@dataclass
class Result:
    name: str
    peak_bytes: int = 0  # memory that it added at its peak, on this rank, in bytes
    seconds: list[float] = field(default_factory=list)  # of each round
    reserved_bytes: int = 0  # all that torch had reserved on a GPU by then, gaps included


def compare(
    contenders: Sequence[Contender],
    *,
    device: torch.device,
    rounds: int,
    warmup: int = 1,
    barrier: Callable[[], None] = lambda: None,
    quiet: bool = False,
) -> list[Result]:
    """Measure every contender. barrier: makes several ranks wait for each other before a round."""
    say = (lambda text: None) if quiet else partial(print, file=sys.stderr, flush=True)
    # Run one contender unmeasured: memory that libraries allocate at first use and keep belongs to none of them.
    _peak(contenders[0], device)
    results = []
    for contender in contenders:
        say(f"memory: {contender.name}")
        peak_bytes, reserved_bytes = _peak(contender, device)
        results.append(Result(contender.name, peak_bytes, reserved_bytes=reserved_bytes))
    with ExitStack() as stack:
        turns = list(zip([stack.enter_context(contender.open()) for contender in contenders], results))
        for number in range(-warmup, rounds):
            for run, result in turns if number % 2 else reversed(turns):
                barrier()
                began = now(device)
                run()
                if number >= 0:
                    result.seconds.append(now(device) - began)
            if number >= 0:
                times = ", ".join(f"{result.name} {result.seconds[-1]:.4g} s" for result in results)
                say(f"round {number + 1} of {rounds}: {times}")
    return results


def add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads that compute")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=best, choices=["cpu", "cuda"], help="where it is measured")


def set_up_device(options: argparse.Namespace) -> torch.device:
    torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, and torch sees no GPU: run largebatch.doctor, or use --device cpu.")
    return torch.device(options.device)


def now(device: torch.device) -> float:
    """Return the time in seconds, when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Span:
    """A stretch of time that begins now, by the clock of the device; only `seconds` waits for its end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = self.ended = self._mark()

    def end(self) -> None:
        self.ended = self._mark()

    def seconds(self) -> float:
        if self.device.type != "cuda":
            return self.ended - self.began
        self.ended.synchronize()
        return self.began.elapsed_time(self.ended) / 1000

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# -- memory ---------------------------------------------------------------------------------------------------------


def _peak(contender: Contender, device: torch.device) -> tuple[int, int]:
    """Return `peak_bytes` and `reserved_bytes` of the contender, when it is opened alone and run twice."""
    before = _start_peak(device)
    with contender.open() as run:
        run()
        run()  # again: now memory that the first run keeps, such as moments, is in use from the start
        now(device)
        if device.type != "cuda":
            return _status_bytes("VmHWM") - before, 0
        return torch.cuda.max_memory_allocated(device) - before, torch.cuda.max_memory_reserved(device)


def _start_peak(device: torch.device) -> int:
    """Reset the peak, and return the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system, so that its reuse counts
    with suppress(OSError):  # some containers forbid it: the peak is then the one since the start of the process
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


# -- hardware and versions ------------------------------------------------------------------------------------------


def hardware(device: torch.device) -> str:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {cores} CPU cores"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {cores} cores, threads per rank: {threads}"


def versions() -> str:
    return ", ".join([f"python {platform.python_version()}", f"torch {torch.__version__}", *installed(PACKAGES)])


# -- the report -----------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """A benchmark's results as a printed table, NAME.csv and NAME.png. The first result is ours."""

    name: str  # name of the files
    title: str
    results: Sequence[Result]
    device: torch.device
    images: int = 0  # images per round on this rank; 0: rounds have no images
    ranks: int = 1  # number of ranks that worked at the same time
    cores: float = 0.0  # cores that a rank had, if ranks may have shared them; 0: not known
    notes: Sequence[str] = ()  # further findings, a line each
    work: Mapping[str, Any] = field(default_factory=dict)  # more columns of the CSV, such as the model

    def ratios(self, peer: Result) -> list[float]:
        """Return our speed divided by that of `peer`, for each round."""
        return [theirs / ours for ours, theirs in zip(self.results[0].seconds, peer.seconds)]

    def lines(self) -> list[str]:
        rate = " img/s per rank" if self.images else ""
        width = max(len(result.name) for result in self.results) + 2
        rows = [f"{'':{width}}{'min':>10}{'median':>10}{'max':>10}{rate:>16}{'peak memory':>14}"]
        for result in self.results:
            low, middle, high = min(result.seconds), statistics.median(result.seconds), max(result.seconds)
            images_per_s = f"{self.images / middle:.1f}" if self.images else ""
            peak = f"{result.peak_bytes / 2**20:.0f} MiB"
            rows.append(f"{result.name:{width}}{low:8.4g} s{middle:8.4g} s{high:8.4g} s{images_per_s:>16}{peak:>14}")
        ours = self.results[0]
        for peer in self.results[1:]:
            speed, memory = statistics.median(self.ratios(peer)), ours.peak_bytes / max(peer.peak_bytes, 1)
            rows.append(
                f"{ours.name} takes {1 / speed:.3f} × the time of {peer.name} ({speed:.2f} × its speed) "
                f"and {memory:.2f} × its memory"
            )
        return [self.title, *rows, *self.notes, f"{self.hardware}; {versions()}; {datetime.date.today()}"]

    @property
    def hardware(self) -> str:
        share = f", cores per rank: {self.cores:.3g}" if self.cores and self.device.type == "cpu" else ""
        return hardware(self.device) + share

    def write(self, folder: Path) -> None:
        print("\n".join(self.lines()), flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._write_csv(folder / f"{self.name}.csv")
        self._draw(folder / f"{self.name}.png")

    def _write_csv(self, path: Path) -> None:
        same = {
            "benchmark": self.title,
            "images": self.images,
            "ranks": self.ranks,
            "cores": "" if self.device.type != "cpu" else f"{self.cores or torch.get_num_threads():.3g}",
            **self.work,
            "command": " ".join(["python -m largebatch.benchmark", *sys.argv[1:]]),
            "hardware": self.hardware,
            "versions": versions(),
            "date": str(datetime.date.today()),
        }
        columns = ["contender", "round", "seconds", "peak_mib", "reserved_mib", *same]
        rows = []
        for result in self.results:
            for number, seconds in enumerate(result.seconds):
                row = {"contender": result.name, "round": number, "seconds": f"{seconds:.6g}"}
                memory = {"peak_mib": result.peak_bytes, "reserved_mib": result.reserved_bytes}
                rows.append(row | {name: round(size / 2**20) for name, size in memory.items()} | same)
        write_table(path, columns, rows)

    def _draw(self, path: Path) -> None:
        """Draw every round as a dot, and the median as a bar from zero."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.9 + 0.5 * len(self.results)), dpi=120, layout="constrained")
        axes = figure.subplots()
        for row, result in enumerate(self.results):
            colour = "#c8442f" if row == 0 else "#2463a6"
            middle = statistics.median(result.seconds)
            axes.barh(row, middle, color=colour, alpha=0.25, height=0.6)
            axes.plot(result.seconds, [row] * len(result.seconds), "o", color=colour, markersize=4, alpha=0.6)
            axes.text(0, row, f"  {middle:.3g} s", va="center", ha="left", fontsize=10)
        axes.set_yticks(range(len(self.results)), [result.name for result in self.results])
        axes.invert_yaxis()
        axes.set_xlim(left=0, right=1.15 * max(max(result.seconds) for result in self.results))
        axes.set_xlabel("seconds per round; bar: median")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{self.title}\n{self.hardware}", fontsize=10, loc="left")
        figure.savefig(path, format="png")


class Reports:
    """Reports that are made one after the other; each is written before the next begins, which may fail."""

    def __init__(self, reports: Iterable[Report]) -> None:
        self.reports = reports

    def write(self, folder: Path) -> None:
        for report in self.reports:
            report.write(folder)
