"""Join the tables of a folder, and of the folders in it, in one Markdown table, such as that of docs/speed.md.

A row for each contender beside ours: the median of the ratios of all rounds.
"""

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from largebatch.devices import device_named
from largebatch.files.atomic import atomic_file
from largebatch.files.table import Row, read_table
from largebatch.flops import training_flops

COLUMNS = ("contender", "seconds", "peak_mib", "benchmark", "images", "command", "hardware", "versions", "date")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="as mpi_scripts/measure_gpu.sh writes it")


def run(options: argparse.Namespace) -> "Page":
    os.scandir(options.folder).close()  # OSError if it may not be listed
    tables = [
        read_table(path, COLUMNS, what="FOLDER", expected="tables of `largebatch.benchmark`")
        for path in sorted(options.folder.rglob("*.csv"))
        if path.name != "scaling.csv"  # joined from others
    ]
    if not tables:
        raise ValueError(f"FOLDER is {options.folder}, which has no CSV file: expected one that measure_gpu.sh wrote.")
    return Page(tables)


@dataclass
class Page:
    tables: Sequence[Sequence[Row]]

    def write(self, folder: Path) -> None:
        text = "\n".join(self.lines())
        print(text)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / "README.md") as file:
            file.write(f"{text}\n".encode())

    def lines(self) -> Iterator[str]:
        yield "| command | contender | median, least, most | of the datasheet | ours has its speed × | its memory × |"
        yield "|---|---|---|---|---|---|"
        for rows in self.tables:
            seconds: dict[str, list[float]] = {}
            for row in rows:
                seconds.setdefault(row["contender"], []).append(float(row["seconds"]))
            peaks = {row["contender"]: float(row["peak_mib"]) for row in rows}
            ours = next(iter(seconds))
            for name, times in seconds.items():
                least, middle, most = (f"{1e3 * t:.4g}" for t in (min(times), median(times), max(times)))
                images = int(rows[0]["images"])
                rate = f"; {images / median(times):,.0f} img/s" if images else ""
                time = f"{middle} ms, {least} to {most}{rate}"
                cells = [f"`{command(rows[0])}`", name, time, share(rows[0], times)]
                speed = median(theirs / own for theirs, own in zip(times, seconds[ours]))
                ratios = [f"{speed:.2f}", f"{peaks[ours] / max(peaks[name], 1):.2f}"]
                cells += ["", memory(rows[0])] if name == ours else ratios
                yield f"| {' | '.join(cells)} |"
        yield ""
        yield from dict.fromkeys(f"{r[0]['hardware']}; {r[0]['versions']}; {r[0]['date']}" for r in self.tables)


def command(row: Row) -> str:
    """Return the command of a table without the folder it wrote to."""
    words = shlex.split(row["command"])
    at = words.index("--output") if "--output" in words else len(words)
    return shlex.join(words[:at] + words[at + 2 :])


def memory(row: Row) -> str:
    """Return the memory of a step beside the plan's; empty for other benchmarks."""
    if not int(row.get("planned_mib") or 0):
        return ""
    reserved = f" of {row['reserved_mib']} reserved" * (row["reserved_mib"] != "0")
    return f"{row['peak_mib']} MiB{reserved}; plan: {row['planned_mib']}"


def share(row: Row, seconds: Sequence[float]) -> str:
    """Return the model's FLOPs as a share of the datasheet; empty for an unknown GPU or rounds without images."""
    device = device_named(row["hardware"])
    if device is None or not row.get("model") or row.get("precision") == "fp32":
        return ""
    flops = int(row["images"]) * training_flops(row["model"], int(row["img_size"])) / median(seconds)
    return f"{100 * flops / device.peak:.1f} %"
