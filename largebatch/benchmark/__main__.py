"""Measure ours beside its peers: minimum, median and maximum, ratio, peak memory, hardware and versions.

    python -m largebatch.benchmark optimizer [--model vit_b32] [--vs timm torch]    a LAMB step
    python -m largebatch.benchmark loader    [--data FOLDER] [--vs timm]            images out of JPEGs
    python -m largebatch.benchmark model     [--model vit_b32] [--vs timm]          forward and backward
    mpirun -np 2 python -m largebatch.benchmark step [--model vit_b32] [--vs timm] [options of largebatch.train]
    python -m largebatch.benchmark step --data resident [...]      the same without files; one process needs no Horovod
    mpirun -np 8 python -m largebatch.benchmark parallel [--model vit_l32]          a model that ranks share
    python -m largebatch.benchmark scaling RANKS_1/step.csv RANKS_2/step.csv ...    join the tables of `step`
    python -m largebatch.benchmark page FOLDER                     all tables of mpi_scripts/measure_gpu.sh on one page

Each prints a table, and writes NAME.csv and NAME.png into --output (runs/benchmark).
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from largebatch.arguments import Parser, complain

BENCHMARKS = ("optimizer", "loader", "model", "step", "parallel", "scaling", "page")


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return
    if argv[0] not in BENCHMARKS:
        sys.stderr.write(f"largebatch: There is no benchmark {argv[0]!r}: expected {', '.join(BENCHMARKS)}.\n")
        sys.exit(2)
    name = argv.pop(0)
    benchmark = importlib.import_module(f"largebatch.benchmark.{name}")  # without the libraries of the others
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(f"benchmark {name}", description=benchmark.__doc__, formatter_class=defaults)
    benchmark.add_options(parser)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of NAME.csv and NAME.png")
    options, rest = parser.parse_known_args(argv)
    if name == "step":
        options.training = rest  # the options of largebatch.train, which `step` reads itself
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        report = benchmark.run(options)
        if report is not None:
            report.write(options.output)
    except (ValueError, OSError) as error:
        sys.exit(complain(error))


if __name__ == "__main__":
    main()
