"""Every command of README.md, and of docs/speed.md, is run as it stands there, but for folders and a shorter run.

test.sh is what runs these tests; .ci/run calls it.
"""

import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import ROOT, run
from PIL import Image

import zoo
from largebatch.doctor import launches
from largebatch.precision import choose_precision

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split(" # ")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]
(SCRIPT,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SPEED = (ROOT / "docs" / "speed.md").read_text()
BENCHMARKS = re.findall(r"^\| `([^`]*largebatch.benchmark[^`]*)`", SPEED, re.MULTILINE)
SHORT = "--run.max_steps 1 --log.to none"
SMALL_BATCH = "--data.global_batch_size 8 --data.micro_batch_size 1"
TINY = f"{SMALL_BATCH} --model.num_classes 2 --model.img_size 64"
SMALL_MODEL = "--model vit_nano32"  # comes last and wins


def readme(start: str, **places: Path) -> str:
    """The command of the README that starts so, with its places filled in; it must be there, perhaps more than once."""
    (command,) = {command for command in COMMANDS if command.startswith(start)}
    for name, path in places.items():
        assert name in command, command
        command = command.replace(name, str(path))
    return command


def succeeds(command: str, *, timeout_s: int = 300, cold: bool = False) -> str:
    """Its output. One command of each section has cold ranks, as a user's."""
    code, output = run(shlex.split(command), timeout_s=timeout_s, cold=cold)
    assert code == 0, output
    return output


def test_nothing_in_the_readme_is_left_out():
    tried = re.findall(r"""readme\(["'](.*?)["']""", Path(__file__).read_text())
    for command in COMMANDS:
        known = command in ("./mpi_scripts/install.sh", "./mpi_scripts/test.sh", "source .venv/bin/activate")
        assert known or any(command.startswith(start) for start in tried), command


def quick_start(folder: Path, *options: str) -> float:
    """Train and validate as it does; top-1 of the held-out digits in percent."""
    command = " ".join([readme("./mpi_scripts/quickstart.sh"), "--run.folder", str(folder), *options])
    output = succeeds(command, timeout_s=1200)
    assert "horovodrun -np 2 python -m largebatch.train --model vit_b32" in output
    top1 = re.search(r"top-1 ([\d.]+) % .* images 360 ", output)
    assert top1 and (folder / "curves.png").stat().st_size > 10_000, output
    return float(top1[1])


def test_the_quick_start_for_two_steps(tmp_path):
    """With a small model; .ci/run also trains the whole of it."""
    quick_start(tmp_path / "run", "--run.max_steps", "2", *SMALL_MODEL.split())


@pytest.mark.evidence
def test_the_quick_start_reaches_its_accuracy(tmp_path):
    """The whole of it: ViT-B/32, two ranks, 95 % of the held-out digits."""
    assert quick_start(tmp_path / "run") >= 95.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The run of one of its commands, in place of the quick start's."""
    folder = tmp_path_factory.mktemp("readme") / "run"
    command = readme("horovodrun -np 4 python -m largebatch.train --model vit_b32")
    succeeds(f"{command} {SHORT} {SMALL_BATCH} {SMALL_MODEL} --run.folder {folder}")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Sixteen training images and as many held-out ones, of two classes."""
    folder, noise = tmp_path_factory.mktemp("readme") / "images", np.random.default_rng(0)
    for split, name in itertools.product(("train", "val"), ("cat", "dog")):
        (folder / split / name).mkdir(parents=True)
        for k in range(8):
            pixels = noise.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / name / f"{k}.jpg")
    return folder


def test_a_plan():
    """Its hours, and the nearest batch that 200 ranks can make."""
    output = succeeds(readme("python -m largebatch.plan"))
    assert "GPU-hours" in output and "global batch 32800 = 200 ranks × 164" in output, output


def test_the_same_under_mpirun(tmp_path):
    command = readme("mpirun -np 2 python -m largebatch.train --model vit_b32")
    options = f"{SHORT} {SMALL_BATCH} {SMALL_MODEL} --run.folder {tmp_path}"
    assert "step 1/" in succeeds(f"{command} {options}", cold=True)


def test_the_zoo_in_a_script_of_your_own(trained):
    assert SCRIPT.count('weights="runs/quickstart"') == 1 == SCRIPT.count("vit_b32")
    script = SCRIPT.replace("runs/quickstart", str(trained)).replace("vit_b32", SMALL_MODEL.split()[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(["python", "-c", script], check=True, env=environment, cwd=trained)


def test_a_report_a_prediction_and_an_export(trained, images, tmp_path):
    places = {"runs/quickstart": trained}
    succeeds(readme("python -m largebatch.report", **places))
    assert (trained / "report.html").stat().st_size > 10_000
    predicted = succeeds(readme("python -m largebatch.predict", IMAGE=images / "val" / "cat" / "0.jpg", **places))
    assert len(re.findall(r"\d+\.\d+ %", predicted)) == 5, predicted
    succeeds(readme("python -m largebatch.export", exported=tmp_path / "exported", **places))
    zoo.create_model(weights=tmp_path / "exported")


def test_your_images(trained, images, tmp_path):
    """Trained, validated, resumed, and fine-tuned from another run; classes and recipe are those of the images."""
    small, run_folder = f"{SHORT} {SMALL_MODEL} --img-size 64", tmp_path / "run"
    places = {"IMAGE_FOLDER": images, "runs/mine": run_folder}
    train = readme("horovodrun -np 2 python -m largebatch.train --data", **places)
    output = succeeds(f"{train} {small}")
    assert "16 training images of 2 classes: recipe scratch" in output and "step 1 of 300" in output, output
    assert "images 16 " in succeeds(readme("python -m largebatch.validate", **{"runs/mine": run_folder}), cold=True)
    assert "step 2 of 300" in succeeds(f"{train} {small} --run.max_steps 2")
    tune = readme("horovodrun -np 2 python -m largebatch.train --init-from", **{"runs/quickstart": trained})
    tune = tune.replace("IMAGE_FOLDER", str(images)).replace("runs/tuned", str(tmp_path / "tuned"))
    output = succeeds(f"{tune} {SHORT} --img-size 128")
    assert "recipe finetune" in output and "position embedding resized from 2 x 2 to 4 x 4" in output, output


def test_packing(images, tmp_path):
    packed = tmp_path / "records"
    pack = readme("python -m largebatch.pack IMAGE_FOLDER", IMAGE_FOLDER=images, TFRECORD_FOLDER=packed)
    succeeds(f"{pack} --shards 2 --validation-shards 1")
    check = readme("python -m largebatch.pack check", TFRECORD_FOLDER=packed)
    assert "train: 16 images, 0 bad" in succeeds(check, cold=True)


def test_the_doctor():
    """This installation can train: every launcher, two processes each; one line for each check."""
    output = succeeds(readme("python -m largebatch.doctor"), cold=True)
    assert output.count(f"the sum is exactly {launches.expected_total(2)} on ") == len(launches.LAUNCHES) == 4
    *lines, last = output.splitlines()
    assert all(line.startswith("ok    ") for line in lines) and last == "all checks passed: ready to train", output


@pytest.mark.evidence
@pytest.mark.parametrize("command", [command for command in BENCHMARKS if "volo_d3" not in command])
def test_the_benchmarks(command, tmp_path):
    """Each on a tiny model, small images or a few of them; that of VOLO-D3 differs from D1's in the model alone."""
    vit = "--model vit_ti16 --img-size 32"  # timm has it, too
    shorter = {
        "step": f"{vit} --data digits {TINY.replace('_classes 2', '_classes 10')} --run.folder {tmp_path / 'run'}",
        "model --model volo_d1": "--img-size 32 --batch-size 2",
        "model": f"{vit} --batch-size 2",
        "optimizer": "--model vit_ti16",
        "loader": "--data digits --images 32 --batch-size 8",
    }
    name = next(name for name in shorter if f"benchmark {name}" in command)
    output = succeeds(f"{command} {shorter[name]} --rounds 1 --output {tmp_path}", cold=name == "optimizer")
    assert "× the time of timm" in output
    if "volo" in command:
        precision = choose_precision(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        assert f"volo_d1 at 32 px, forward and backward, {precision}, batch 2" in output and "MFU" in output
        assert all(f"the time of {peer} (" in output for peer in ("timm", "timm, unfused attention"))
    name = name.split()[0]
    assert (tmp_path / f"{name}.csv").exists() and (tmp_path / f"{name}.png").exists()
