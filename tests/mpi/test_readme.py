"""Every command of README.md is run as it stands there, except for its folder and a shorter, smaller run.

test.sh is what runs these tests; .ci/run calls it.
"""

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
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
BENCHMARKS = re.findall(r"^\| `([^`]*largebatch.benchmark[^`]*)`", README, re.MULTILINE)
SHORT = "--run.max_steps 1 --log.tensorboard false"
SMALL_BATCH = "--data.global_batch_size 8 --data.micro_batch_size 1"
TINY = f"{SMALL_BATCH} --model.num_classes 2 --model.img_size 64"
SMALL_MODEL = "--model vit_nano32"  # comes last and wins


def readme(start: str, **places: Path) -> str:
    """The one command of the README that starts so, with its places filled in; it must be there."""
    (command,) = [command for command in COMMANDS if command.startswith(start)]
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
        known = command in ("./mpi_scripts/test.sh", "source .venv/bin/activate")
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
    folder = tmp_path_factory.mktemp("readme") / "run"
    command = readme("horovodrun -np 4 python -m largebatch.train --model vit_b32")
    succeeds(f"{command} {SHORT} {SMALL_BATCH} {SMALL_MODEL} --run.folder {folder}")
    return folder


def test_the_same_under_mpirun(tmp_path):
    command = readme("mpirun -np 2 python -m largebatch.train --model vit_b32")
    options = f"{SHORT} {SMALL_BATCH} {SMALL_MODEL} --run.folder {tmp_path}"
    assert "step 1 of" in succeeds(f"{command} {options}", cold=True)


def test_the_zoo_in_a_script_of_your_own(trained):
    script = SCRIPTS[0]
    weights = next(trained.glob("checkpoints/*/model.safetensors"))
    script, found = re.subn(r'weights="[^"]+"', f'weights="{weights}"', script)
    assert found == 1 and script.count("vit_b32") == 1
    script = script.replace("vit_b32", SMALL_MODEL.split()[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(["python", "-c", script], check=True, env=environment, cwd=trained)


def test_fine_tuning_in_a_loop_of_your_own(tmp_path, monkeypatch):
    """From weights of another size and other classes, head first, on two ranks."""
    weights = tmp_path / "vit_ti16.safetensors"
    zoo.save_weights(zoo.create_model("vit_ti16"), weights)
    assert len(SCRIPTS[1].splitlines()) < 60
    (tmp_path / "finetune.py").write_text(SCRIPTS[1])
    command = readme("horovodrun -np 2 python finetune.py", WEIGHTS=weights)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    output = succeeds(f"env --chdir {tmp_path} {command}")
    accuracies = [float(found) for found in re.findall(r"epoch \d: ([\d.]+) % of 360 held-out digits", output)]
    assert len(accuracies) == 3 and accuracies[-1] > 50, output
    zoo.create_model("vit_ti16", img_size=32, num_classes=10, weights=tmp_path / "finetuned.safetensors")


def test_packing_training_and_validating(tmp_path):
    noise = np.random.default_rng(0)
    for split in ("train", "validation"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for k in range(8):
                pixels = noise.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{k}.JPEG")
    packed, run_folder = tmp_path / "records", tmp_path / "run"
    pack = readme("python -m largebatch.pack IMAGE_FOLDER", IMAGE_FOLDER=tmp_path / "images", TFRECORD_FOLDER=packed)
    succeeds(f"{pack} --shards 2 --validation-shards 1")
    check = readme("python -m largebatch.pack check", TFRECORD_FOLDER=packed)
    assert "train: 16 images, 0 bad" in succeeds(check, cold=True)
    train = readme("horovodrun -np 4 python -m largebatch.train --data", TFRECORD_FOLDER=packed)
    small = f"{SHORT} {TINY} --recipe vit_b32 {SMALL_MODEL}"
    output = succeeds(f"{train} {small} --run.folder {run_folder}")
    assert "recipe vit_b32: vit_nano32 at 64 px" in output and "8 = 4 ranks × 1 micro-batch × 2 passes" in output
    validate = readme("horovodrun -np 4 python -m largebatch.validate", **{"runs/vit_b32": run_folder})
    assert "images 16 " in succeeds(validate)
    places = {"runs/vit_b32 ": f"{run_folder} ", "TFRECORD_FOLDER": packed}
    tune = readme("horovodrun -np 2 python -m largebatch.train --init-from", **places)
    output = succeeds(f"{tune} {small} --img-size 128 --run.folder {tmp_path / 'tuned'}")
    assert "position embedding resized from 2 x 2 to 4 x 4" in output and "step 1 of" in output


def test_the_doctor():
    """This installation can train: every launcher, two processes each; one line for each check."""
    output = succeeds(readme("python -m largebatch.doctor"), cold=True)
    assert output.count(f"the sum is exactly {launches.expected_total(2)} on ") == len(launches.LAUNCHES) == 3
    *lines, last = output.splitlines()
    assert all(line.startswith("ok    ") for line in lines) and last == "all checks passed: ready to train", output


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
