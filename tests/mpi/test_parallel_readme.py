"""The commands of largebatch/parallel/README.md run as they stand there, on few blocks and for one step."""

import re
import shlex

import pytest
from launch import ROOT, run

import zoo

COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "largebatch/parallel/README.md").read_text(), re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]
SHORT = "--run.max_steps 1 --log.tensorboard false --img-size 32 --data.global_batch_size 16 --data.micro_batch_size 8"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command, tmp_path):
    code, output = run([*shlex.split(command), *shlex.split(SHORT), "--run.folder", str(tmp_path)], timeout_s=400)
    assert code == 0 and "step 1 of" in output, output
    weights = tmp_path / "checkpoints" / "00000001" / "model.safetensors"
    assert weights.stat().st_size > 3e8  # the whole of it
    if "3d" in command:
        code, output = run(["python", "-m", "largebatch.validate", str(tmp_path)])
        assert code == 0 and "images 360" in output, output
        zoo.create_model("vit_b32", img_size=32, num_classes=10, weights=weights)


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
