"""Whole runs to which something happens that nobody would see: a second job in the folder, bits that flip, a NaN."""

import os
import re
from pathlib import Path

from launch import LAUNCHERS, WAIT_S, launch, started, wait_for
from runs import SMALL, steps_saved

from largebatch.report.history import saved_step

BATCH = ["--data.global_batch_size", "48", "--data.micro_batch_size", "4"]
LENGTH = ["--run.duration", "6 steps", "--run.eval_every", "2 steps", "--checkpoint.every", "2 steps"]


def training(folder: Path, *options: str, fault: str = "") -> list[str]:
    """What python is given. fault: one of programs.py."""
    program = ["-m", "tests.mpi.programs", fault] if fault else ["-m", "largebatch.train"]
    return [*program, *SMALL, *BATCH, *LENGTH, "--run.folder", str(folder), *options]


def content(folder: Path) -> dict[Path, bytes]:
    """All files but the lock, in which its holder counts."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_second_job_in_a_run_folder_is_refused_and_changes_nothing(tmp_path):
    """Until the first one is gone, here by SIGKILL of its rank 0; then it goes on from the newest checkpoint."""
    folder, output = tmp_path / "run", tmp_path / "output"
    command = [*LAUNCHERS["mpirun"](2), "python", *training(folder, fault="waits_in_step=3")]

    def waits() -> bool:
        """And its thread that writes the checkpoint is done: the line in the history comes last."""
        return first.poll() is not None or ((folder / "waits").exists() and saved_step(folder) == 2)

    with started(command, output, cold=False) as first:
        wait_for(waits, output)
        before = content(folder)
        code, text = launch(training(folder), ranks=2)
        assert code == 2 and content(folder) == before, text
        assert text.count(f"{folder} is in use by process ") == 1 and "choose another --run.folder." in text, text
        assert text.count("Exit code:") <= 1 and "Traceback" not in text, text
        (folder / "go").touch()
        assert first.wait(WAIT_S) != 0
    code, text = launch(training(folder), ranks=2)
    assert code == 0 and "resumed at step 2 from" in text and steps_saved(folder)[-1] == 6, text


def test_a_flipped_bit_ends_the_run_before_it_is_saved(tmp_path):
    """Also if no evaluation comes in between."""
    options = ["--run.eval_every", "5 steps", "--optim.ema_half_life", "40 images"]
    code, text = launch(training(tmp_path, *options, fault="flips_a_bit_after_step=3"), ranks=3)
    assert code == 2 and steps_saved(tmp_path) == [2], text
    host = os.uname().nodename
    sentence = f"largebatch: rank 1 ({host}) holds other values of head.weight than most ranks: found after step 4. "
    assert text.count(sentence) == 1 and "the run goes on from its newest checkpoint" in text, text


def test_a_nan_is_traced_to_its_image(tmp_path):
    code, text = launch(training(tmp_path, fault="spoils_an_image_in_step=3"), ranks=3)
    assert code == 0 and steps_saved(tmp_path)[-1] == 6, text
    samples = set(re.findall(r"spoilt sample (\d+)\.", text))
    (told,) = re.findall("step 4 skipped: .*", text)
    place = rf"it began on rank 1 \({os.uname().nodename}\): micro-batch 1, sample (\d+) \(/.*, record \d+ "
    assert samples == set(re.findall(place, told)), text
    assert "the loss is not finite on rank 1; computed again, " in told and "with pixels that are not fin" in told
