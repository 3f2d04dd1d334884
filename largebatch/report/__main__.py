"""Reports on runs.

    python -m largebatch.report diff RUN_A RUN_B

diff names the options and versions in which two runs differ, the first step that took other images or gave other
numbers, and the first tensor that differs in the checkpoints of the same step. Not compared are times and
train_loss, whose mean begins anew when a run is resumed. Exit codes: 0 if
nothing differs, 1 if something does, 2 if a run cannot be read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from largebatch.report.diff import compare


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    diff = commands.add_parser("diff", help="the first difference of two runs")
    diff.add_argument("one", type=Path, metavar="RUN_A", help="the folder of a run")
    diff.add_argument("other", type=Path, metavar="RUN_B", help="the folder of another run")
    args = parser.parse_args(argv)
    try:
        findings = compare(args.one, args.other)
    except ValueError as mistake:
        sys.stderr.write(f"largebatch: {mistake}\n")
        return 2
    for finding in findings:
        print(finding)
    return int(any(finding.differs for finding in findings))


if __name__ == "__main__":
    raise SystemExit(main())
