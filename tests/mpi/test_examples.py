"""The programs of examples/ run as their docstrings say, and docs/your-loop.md shows what is in them."""

import ast
import importlib.util
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from launch import ROOT, run
from PIL import Image
from torch.utils.data import TensorDataset, default_collate

import zoo
from largebatch.files.run_lock import hold
from largebatch.ranks.single import Single

# The packages of this tree, from any folder. Ranks of plain Horovod wait busily, and torch would use all cores in each.
FOUND = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {"PYTHONPATH": FOUND, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "digits")
PAGE = (ROOT / "docs" / "your-loop.md").read_text()


def command(name: str) -> str:
    """The first command in the docstring of an example."""
    said = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()), clean=False) or ""
    return re.findall(rf"^    (\S.* examples/{name}\.py.*?)(?:  +#.*)?$", said, re.MULTILINE)[0]


def example(name: str, folder: Path, *options: str, **places: Path) -> str:
    """Run that command in a folder, with its places filled in; return its output."""
    words = shlex.split(command(name))
    words = [str(places.get(word, word)) for word in words]
    words = [word.replace("examples/", f"{ROOT}/examples/") for word in words]
    code, output = run(["env", "--chdir", str(folder), *words, *options], environment=ENVIRONMENT)
    assert code == 0, output
    return output


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"([\d.]+) % of 360 held-out digits", output)]


@pytest.mark.parametrize("name", ["plain_loop", "session_loop", "own_loop"])
def test_a_loop_learns(tmp_path, name):
    reached = accuracies(example(name, tmp_path))
    assert len(reached) == 3 and reached[-1] > 40, reached


NEEDED = {"lightning_fit": "lightning", "accelerate_loop": "accelerate", "hf_trainer": "transformers"}


@pytest.mark.parametrize("name", NEEDED)
def test_a_program_of_another_package_learns(tmp_path, name):
    if not importlib.util.find_spec(NEEDED[name]):
        pytest.skip(f"{NEEDED[name]} is not installed: it comes with the extra examples of setup.cfg")
    assert accuracies(example(name, tmp_path))[-1] > 40


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run of the example of a hook: an accuracy that does not rise, because the learning rate is zero."""
    folder = tmp_path_factory.mktemp("hook")
    options = "--optim.lr 0 --data.global_batch_size 64 --run.duration '5 steps' --run.eval_every '1 step'"
    output = example("hook", folder, *shlex.split(options), "--log.to", "none")
    assert re.search(r"step 3 of 5; top-1 was not above 10.0 % in 2 evaluations", output), output
    return folder / "runs" / "hook"


def test_a_run_of_a_script_leaves_what_the_command_leaves(run_folder):
    """Also its log and its options; the folder is free again."""
    assert {"checkpoints", "config.yaml", "curves.png", "epochs.csv", "log.txt", "steps.csv"} <= {
        path.name for path in run_folder.iterdir()
    }
    assert "recipe quickstart: vit_nano32 at 64 px" in (run_folder / "log.txt").read_text()
    with hold(run_folder):
        pass


def test_a_tracker_prints_what_the_tables_have(tmp_path):
    options = "--data.global_batch_size 64 --run.duration '3 steps' --run.eval_every '3 steps' --log.to none"
    output = example("tracker", tmp_path, *shlex.split(options))
    rows = [json.loads(line) for line in re.findall(r"\{.*\}", output)]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert [*rows[0]][:2] == ["step", "train/loss"] and "epoch/top1" in rows[-1]


def test_images_are_classified(run_folder, tmp_path):
    Image.new("L", (30, 40), 200).save(tmp_path / "grey.png")
    places = {"runs/quickstart": run_folder, "IMAGE": tmp_path / "grey.png"}
    output = example("inference", tmp_path, **places)
    assert re.fullmatch(rf"{tmp_path}/grey.png( \d [\d.]+ %,?){{3}}\n", output), output


def test_fine_tuning_starts_from_a_run(run_folder, tmp_path):
    """The head first, then everything; from weights with other classes."""
    (weights, *_) = run_folder.glob("checkpoints/*/model.safetensors")
    reached = accuracies(example("finetune", tmp_path, "--weights", str(weights)))
    assert len(reached) == 3 and reached[-1] > 60, reached
    zoo.create_model("vit_nano32", img_size=64, num_classes=2, weights=tmp_path / "finetuned.safetensors")


def test_timms_program_takes_our_lamb(tmp_path):
    """A stand-in for train.py: what it makes of --opt; the real one needs a clone of timm's repository."""
    (tmp_path / "train.py").write_text(
        "import sys, timm, timm.optim\n"
        "model = timm.create_model('vit_tiny_patch16_224', depth=1)\n"
        "for decay in (0.1, 0.0):\n"
        "    optimizer = timm.optim.create_optimizer_v2(model, opt=sys.argv[-1], lr=0.5, weight_decay=decay)\n"
        "    print(type(optimizer), [(g['lr'], g['weight_decay'], g['adapt']) for g in optimizer.param_groups])\n"
    )
    output = example("timm_train", tmp_path, **{"pytorch-image-models/train.py": tmp_path / "train.py"})
    lamb = "<class 'largebatch.optim.lamb.Lamb'>"
    assert output.splitlines() == [
        f"{lamb} [(0.5, 0.0, False), (0.5, 0.1, True)]",
        f"{lamb} [(0.5, 0.0, False)]",
    ]


# -- what is written about them --------------------------------------------------------------------------------------


def test_every_example_is_listed_with_its_command():
    table = (ROOT / "examples" / "README.md").read_text()
    rows = re.findall(r"^\| [^|]* \| `(.*?)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(command(path.stem) for path in EXAMPLES)


def sections() -> list[tuple[str, list[str]]]:
    """The Python of each section of the page, with the text before it."""
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    return [(part, re.findall(r"```python\n(.*?)```", part, re.DOTALL)) for part in parts]


def test_the_page_shows_what_is_in_the_examples():
    shown = 0
    for text, blocks in sections():
        files = [ROOT / "examples" / name for name in re.findall(r"\]\(\.\./examples/(\w+\.py)\)", text)]
        for block in blocks:
            if not block.startswith(("from largebatch import Lamb", "for batch in")):  # these two are run below
                assert any(block in file.read_text() for file in files), block
                shown += 1
    assert shown == 9


def test_the_diff_of_the_page_is_that_of_the_two_loops():
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    for name, left_out in (("plain_loop", "+"), ("session_loop", "-")):
        lines = [line[1:].strip() for line in diff.splitlines() if not line.startswith(left_out)]
        program = [line.strip() for line in (ROOT / "examples" / f"{name}.py").read_text().splitlines()]
        assert lines == program[len(program) - len(lines) :], name
    assert sum(line.startswith("+") for line in diff.splitlines()) == 7 and "seven other lines" in PAGE


def test_the_other_snippets_run():
    """LAMB in one call, and images that a rank loads itself."""
    blocks = [block for _, blocks in sections() for block in blocks]
    lamb, loading = (block for block in blocks if block.startswith(("from largebatch import Lamb", "for batch")))
    names = {"model": torch.nn.Linear(3, 3)}
    exec(lamb, names)
    assert [group["adapt"] for group in names["optimizer"].param_groups] == [True, False]
    train = TensorDataset(torch.arange(10.0), torch.arange(10))
    seen = []
    names = {"torch": torch, "train": train, "BATCH": 4, "order": torch.Generator().manual_seed(0), "seen": seen}
    names |= {"default_collate": default_collate, "comm": Single()}
    exec(loading + "        seen += labels.tolist()\n", names)
    assert sorted(seen) == list(range(10))


UNSEEDED = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import largebatch

images = torch.linspace(-1, 1, 23 * 12).view(23, 12).sin()
labels = (images.sum(1) > 0).long()
WITH
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2 * (sys.argv[2] == "dropout")), nn.Linear(16, 2))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
OPTIMIZER
    for epoch in range(3):
STEP
            optimizer.zero_grad()
    weights = [tensor.tolist() for tensor in model.state_dict().values()]
    with open(f"{sys.argv[1]}.{comm.rank}", "w") as file:
        json.dump(weights, file)
"""


@pytest.mark.parametrize("dropout", ["", "dropout"])
def test_the_diff_of_the_readme_trains_one_model_without_any_seed(tmp_path, dropout):
    """The last batch of an epoch is too short for its parts to be equal. Dropout depends on the number of parts."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    program = UNSEEDED.replace("WITH", lines[0]).replace("OPTIMIZER", lines[1]).replace("STEP", "\n".join(lines[2:]))
    (tmp_path / "loop.py").write_text(program)
    found = []
    for ranks, launcher in ((1, []), (2, ["horovodrun", "-np", "2"]), (3, ["mpirun", "-np", "3"])):
        command = [*launcher, "python", str(tmp_path / "loop.py"), str(tmp_path / f"of_{ranks}"), dropout]
        code, output = run(command, environment=ENVIRONMENT)
        assert code == 0, output
        of_ranks = [json.loads((tmp_path / f"of_{ranks}.{rank}").read_text()) for rank in range(ranks)]
        assert all(one == of_ranks[0] for one in of_ranks)
        found.append([torch.tensor(weights, dtype=torch.float64) for weights in of_ranks[0]])
    for other in found[1:] if not dropout else ():
        assert all((p - q).norm() <= 1e-6 * q.norm() for p, q in zip(other, found[0]))
