"""Reports on runs.

    python -m largebatch.report RUN [RUN ...] [--output FOLDER] [--pictures]
    python -m largebatch.report diff RUN_A RUN_B

The first writes report.html, one page with all curves, the history, the options and the errors of the runs: into the
folder of a single run, or into --output. With --pictures its diagrams lie beside it as report_*.png, for slides.

diff names the options and versions in which two runs differ, the first step that took other images or gave other
numbers, and the first tensor that differs in the checkpoints of the same step. Times are not compared. Exit codes: 0
if nothing differs, 1 if something does.

The exit code is 2 if a run cannot be read.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from largebatch.arguments import Parser, complain
from largebatch.files.names import on_screen
from largebatch.files.run_folder import RunFolder
from largebatch.report.diff import compare


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return diff(words[1:]) if words[:1] == ["diff"] else report(words)
    except (ValueError, OSError) as mistake:
        return complain(mistake)


def report(words: Sequence[str]) -> int:
    from largebatch.report.draw import write_pictures
    from largebatch.report.page import write_page
    from largebatch.report.panels import panels, read_runs

    parser = Parser("report", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for the page and its pictures")
    parser.add_argument("--pictures", action="store_true", help="write the diagrams as PNG files, too")
    args = parser.parse_args(words)
    if len(args.runs) > 1 and args.output is None:
        raise ValueError(f"There are {len(args.runs)} runs: give --output FOLDER for their page.")
    folder: Path = args.output or args.runs[0]
    runs = read_runs(args.runs)
    folder.mkdir(parents=True, exist_ok=True)
    shown = panels(runs)
    page = RunFolder(folder).report
    write_page(page, runs, shown)
    if args.pictures:
        pictures = write_pictures(folder, runs, shown)
        print(on_screen(f"{page}, and {len(pictures)} pictures beside it: {folder}/report_*.png"))
    else:
        print(on_screen(str(page)))
    return 0


def diff(words: Sequence[str]) -> int:
    parser = Parser("report diff", __doc__)
    parser.add_argument("one", type=Path, metavar="RUN_A", help="the folder of a run")
    parser.add_argument("other", type=Path, metavar="RUN_B", help="the folder of another run")
    args = parser.parse_args(words)
    findings = compare(args.one, args.other)
    for finding in findings:
        print(on_screen(str(finding)))
    return int(any(finding.differs for finding in findings))


if __name__ == "__main__":
    raise SystemExit(main())
