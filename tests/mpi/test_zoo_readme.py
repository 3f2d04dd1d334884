"""The commands of zoo/README.md, one after the other as they stand there, with two small steps for each training."""

import re
import shlex

from launch import ROOT, run

README = (ROOT / "zoo" / "README.md").read_text()
SHORT = "--run.max_steps 2 --data.global_batch_size 8 --data.micro_batch_size 2 --log.tensorboard false"


def test_volo_learns_from_a_teacher(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (block,) = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    outputs = []
    for command in block.replace("checkpoints/00000169", "checkpoints/00000002").splitlines():
        shorter = f"{command} {SHORT}" if "largebatch.train" in command else command
        code, output = run(shlex.split(f"env --chdir {tmp_path} {shorter}"), timeout_s=300)
        assert code == 0, output
        outputs.append(output)
    packed, _, labelled, trained, tuned = outputs
    assert "train: 1437 images" in packed and "train: 1437 images with label maps" in labelled
    assert "recipe quickstart: volo_d1 at 64 px" in trained and "step 2 of" in trained
    assert "position embedding resized from 4 x 4 to 6 x 6" in tuned and "left out" not in tuned


def test_the_table_has_every_model_and_recipe():
    from largebatch.recipes import RECIPES
    from zoo import MODELS

    for name in [*MODELS, *RECIPES]:
        assert f"`{name}`" in README or name in [f"volo_d{k}_lamb" for k in (2, 3, 4)], name
