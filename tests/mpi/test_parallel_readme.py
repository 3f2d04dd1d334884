"""The commands of largebatch/parallel/README.md run for one step: on a small model, and as evidence as they stand."""

import re
import shlex
from typing import Any

import pytest
from launch import ROOT, run

import zoo

COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "largebatch/parallel/README.md").read_text(), re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]
SHORT = "--run.max_steps 1 --log.to none --data.global_batch_size 16 --data.micro_batch_size 8"
NANO = ["--model", "vit_nano32", "--img-size", "64"]
FULL = ["--img-size", "32"]


def tried(options: list[str], name: str, *marks: pytest.MarkDecorator) -> list[Any]:
    """Each command with these options; eight ranks have a tier of their own."""
    eight = {command: [pytest.mark.cluster] for command in COMMANDS if " -np 8 " in command}
    return [
        pytest.param(command, options, marks=marks or eight.get(command, []), id=f"{name}{number}")
        for number, command in enumerate(COMMANDS)
    ]


@pytest.mark.parametrize("command, options", tried(NANO, "nano") + tried(FULL, "full", pytest.mark.evidence))
def test_a_command(command, options, tmp_path):
    """The weights are the whole model's: the zoo reads them."""
    words = [*shlex.split(command), *shlex.split(SHORT), *options]
    code, output = run([*words, "--run.folder", str(tmp_path)], timeout_s=400)
    assert code == 0 and "step 1 of" in output, output
    weights = tmp_path / "checkpoints" / "00000001" / "model.safetensors"
    name, size = ("vit_nano32", 64) if options is NANO else ("vit_b32", 32)
    zoo.create_model(name, img_size=size, num_classes=10, weights=weights)
    if "3d" in command:
        code, output = run(["python", "-m", "largebatch.validate", str(tmp_path)])
        assert code == 0 and "images 360" in output, output


def test_there_are_commands():
    assert len(COMMANDS) == 3


def test_the_benchmark(tmp_path):
    """On two ranks instead of eight, and a smaller model."""
    smaller = "--model vit_b32 --img-size 64 --batch-size 4 --rounds 1"
    command = f"mpirun -np 2 python -m largebatch.benchmark parallel {smaller} --output {tmp_path}"
    code, output = run(shlex.split(command))
    assert code == 0, output
    for name in ("1d, 2 ranks", "pipeline 2", "sequence 2"):
        assert f"{name}: a rank sends " in output, output
    assert "1d, 2 ranks takes" in output and (tmp_path / "parallel.png").exists()
