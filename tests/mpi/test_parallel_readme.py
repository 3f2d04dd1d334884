"""The commands of largebatch/parallel/README.md run as they stand there, on few blocks and for one step."""

import re
import shlex

import pytest
from launch import ROOT, run

COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "largebatch/parallel/README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
    if line and not line.startswith("#")
]
SHORT = "--run.max_steps 1 --log.tensorboard false --img-size 32 --data.global_batch_size 16 --data.micro_batch_size 8"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command, tmp_path):
    code, output = run([*shlex.split(command), *shlex.split(SHORT), "--run.folder", str(tmp_path)], timeout_s=400)
    assert code == 0 and "step 1 of" in output, output
    assert (tmp_path / "checkpoints" / "00000001" / "model.safetensors").stat().st_size > 3e8  # the whole of it


def test_there_are_commands():
    assert len(COMMANDS) == 3
