"""What must never be lost, tried on purpose: campaigns of planted faults, each with a number and PASS or FAIL.

    python -m tests.reliability [R1 R2 ...] [--full] [--folder runs/reliability]

Without --full each campaign has the size that CI runs, seconds each. A campaign that was broken off goes on where it
was; another --folder begins anew. The exit code is 0 if all passed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the helpers of the tests are

from rich.progress import Progress, TaskID  # noqa: E402

from tests.reliability.campaign import Size, carry_out  # noqa: E402
from tests.reliability.campaigns import CAMPAIGNS  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [campaign.name for campaign in CAMPAIGNS]
    parser.add_argument("campaigns", nargs="*", metavar="R", help=f"of {', '.join(names)}; all if none is given")
    parser.add_argument("--full", action="store_true", help="the full size; README.md beside this file has the times")
    parser.add_argument("--folder", type=Path, default=Path("runs/reliability"), help="files of the runs, and results")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.campaigns) - set(names):
        parser.error(f"there is no campaign {min(unknown)}: expected some of {', '.join(names)}")
    chosen = [campaign for campaign in CAMPAIGNS if campaign.name in (arguments.campaigns or names)]
    folder = arguments.folder.resolve() / ("full" if arguments.full else "gate")
    verdicts = []
    with Progress(transient=True) as progress:
        for campaign in chosen:
            size = Size(folder / campaign.name, arguments.full)
            task = progress.add_task(f"{campaign.name} {campaign.promise}", total=len(list(campaign.trials(size))))

            def tell(said: str, task: TaskID = task) -> None:
                progress.console.print(said, markup=False, highlight=False)
                progress.advance(task)

            try:
                verdicts.append(carry_out(campaign, size, tell))
            except ValueError as held:  # by another process
                parser.error(str(held))
            progress.remove_task(task)
            print(verdicts[-1], flush=True)
    return int(any(verdict.failures for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
