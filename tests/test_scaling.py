"""The joined table of several numbers of ranks: its figures, and mistakes."""

import csv
from pathlib import Path

import pytest

from largebatch.benchmark import scaling
from largebatch.benchmark.__main__ import main
from largebatch.plan.calibrate import read_measured

COLUMNS = ["contender", "round", "seconds", "peak_mib", "benchmark", "images", "ranks", "cores", "model", "img_size"]
COLUMNS += ["precision", "micro_batch", "data", "plain", "command", "hardware", "versions", "date"]


def table(folder: Path, *, ranks: int, images: int, seconds: list[float]) -> str:
    """What `benchmark step` writes, with a peer that takes ten times as long."""
    folder.mkdir()
    with open(folder / "step.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, times in (("largebatch", seconds), ("timm + DDP", [10 * t for t in seconds])):
            for number, s in enumerate(times):
                work = [images, ranks, "", "vit_nano32", 64, "bf16", images, "resident", False]
                writer.writerow([name, number, s, 1, f"{ranks} ranks", *work, "c", "h", "v", "2026-11-21"])
    return str(folder / "step.csv")


def test_tables_are_joined_in_order_of_ranks(tmp_path, capsys):
    four = table(tmp_path / "4", ranks=4, images=64, seconds=[2.0, 2.5, 9.0])
    one = table(tmp_path / "1", ranks=1, images=64, seconds=[2.0, 1.9, 2.1])
    main(["scaling", four, one, "--output", str(tmp_path / "out")])
    output = capsys.readouterr().out
    with open(tmp_path / "out" / "scaling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ranks"] for row in rows] == ["1", "4"]
    assert [float(row["images_per_s"]) for row in rows] == [32.0, 102.4]
    assert [float(row["efficiency"]) for row in rows] == [1.0, 0.8]
    assert rows[1]["benchmark"] == "4 ranks" and rows[1]["date"] == "2026-11-21"
    assert "80.0 %" in output and (tmp_path / "out" / "scaling.png").stat().st_size > 10_000


def test_the_same_batch_on_more_ranks_counts_alike(tmp_path):
    """Strong scaling: half the images per rank in half the time is perfect."""
    files = [table(tmp_path / str(n), ranks=n, images=128 // n, seconds=[4.0 / n]) for n in (1, 2)]
    rows = [read_measured(Path(file), option="STEP.CSV") for file in files]
    assert scaling.Scaling(rows).efficiency(rows[1]) == 1.0


def test_efficiency_is_relative_to_the_smallest_number_of_ranks(tmp_path):
    """Which need not be one."""
    files = [table(tmp_path / str(n), ranks=n, images=64, seconds=[seconds]) for n, seconds in ((2, 2.0), (8, 2.5))]
    joined = scaling.Scaling([read_measured(Path(file), option="STEP.CSV") for file in files])
    assert [joined.efficiency(row) for row in joined.rows] == [1.0, 0.8]


def test_two_tables_of_one_number_of_ranks(tmp_path, capsys):
    files = [table(tmp_path / name, ranks=2, images=8, seconds=[1.0]) for name in "ab"]
    with pytest.raises(SystemExit, match="^2$"):
        main(["scaling", *files])
    assert "Two tables have 2 ranks: give one table for each number of ranks." in capsys.readouterr().err


def test_a_table_of_something_else(tmp_path, capsys):
    (tmp_path / "other.csv").write_text("contender,round,seconds\nlargebatch,0,1\n")
    for file, sentence in (("other.csv", "which has no rows with benchmark, hardware"), ("none.csv", "No such file")):
        with pytest.raises(SystemExit, match="^2$"):
            main(["scaling", str(tmp_path / file)])
        assert sentence in capsys.readouterr().err
    step = Path(table(tmp_path / "passes", ranks=1, images=8, seconds=[1.0]))
    step.write_text(step.read_text().replace("resident", ""))
    with pytest.raises(SystemExit, match="^2$"):
        main(["scaling", str(step)])
    assert "STEP.CSV is a table of '1 ranks': expected steps, of `largebatch.ben" in capsys.readouterr().err
