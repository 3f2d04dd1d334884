"""SECURITY.md is true: what is read runs no code, and no shell reads a path."""

import ast
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from largebatch import train, validate
from largebatch.benchmark import resident
from largebatch.checkpoint import why_invalid
from largebatch.checkpoint.resume import check_config
from largebatch.config import dump, load, parse
from largebatch.data import imagenet_real, shard_check
from largebatch.data.sources import class_names
from largebatch.export.folder import card
from largebatch.files import run_lock
from largebatch.files.run_folder import RunFolder
from largebatch.plan import __main__ as plan
from largebatch.recipes import depends_on_data
from largebatch.report import diff, summary
from largebatch.report.__main__ import report
from largebatch.report.history import read_starts
from zoo import create_model, hub, load_weights, save_weights

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for package in ("largebatch", "zoo")
    for path in sorted((ROOT / package).rglob("*.py"))
}
SAFELY = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
UNPICKLE = {"pickle.load", "pickle.loads", "pickle.Unpickler"}
SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
CODE = {"eval", "exec", "yaml.load", "yaml.unsafe_load"}


def calls() -> list[tuple[str, str, dict[str, object]]]:
    """The file, the name and the constant keywords of every call."""
    nodes = [(file, node) for file, tree in SOURCES.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    keywords = [{k.arg: k.value.value for k in n.keywords if isinstance(k.value, ast.Constant)} for _, n in nodes]
    return [(file, ast.unparse(node.func), given) for (file, node), given in zip(nodes, keywords)]


def test_tensors_and_arrays_are_read_without_pickles():
    seen = [(file, name, given.get(SAFELY[name][0])) for file, name, given in calls() if name in SAFELY]
    assert {name for _, name, _ in seen} == SAFELY.keys(), "the search finds them"
    assert [one for one in seen if one[2] is not SAFELY[one[1]][1]] == []


def test_only_ranks_of_one_job_send_each_other_pickles():
    assert {file for file, name, _ in calls() if name in UNPICKLE} == {"largebatch/ranks/horovod.py"}


def test_no_text_is_run_as_a_command_or_as_code():
    """But for the file that a user names as a recipe on the command line: it is a program of the user's own."""
    found = [(file, name) for file, name, given in calls() if name in SHELL | CODE or given.get("shell")]
    assert found == [("largebatch/recipes/user_file.py", "exec")]


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_file_of_weights_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"head.weight": torch.zeros(1), "harm": Harm()}, "weights.pth")
    with pytest.raises(ValueError, match="weights.pth"):
        load_weights(torch.nn.Linear(1, 1), "weights.pth")
    assert os.listdir() == ["weights.pth"]


def test_a_config_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("run: {folder: !!python/object/apply:os.mkdir [harm]}\n")
    with pytest.raises(ValueError, match="python/object/apply:os.mkdir would make an object"):
        parse(["--config", "run.yaml"], choose_recipe=lambda given: None)
    assert os.listdir() == ["run.yaml"]


NOTES = """
import pathlib
pathlib.Path(__file__).with_name("harm").touch()
def recipe():
    from largebatch.recipes.quickstart import quickstart
    return quickstart("vit_nano32")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run folder of somebody else, with a checkpoint; its config.yaml names code as its recipe."""
    monkeypatch.chdir(tmp_path)
    Path("notes.py").write_text(NOTES)
    saved = Path("run/checkpoints/00000002")
    saved.mkdir(parents=True)
    save_weights(create_model("vit_nano32", img_size=64, num_classes=10), saved / "model.safetensors")
    Path("run/steps.csv").write_text("step\n2\n")
    config = train.read(["--recipe", "notes.py:recipe", "--run.folder", "run"])
    Path("harm").unlink()  # it was named on the command line
    Path("notes.py").write_text(f"{NOTES}\n")  # a file runs once, until it changes
    Path("run/config.yaml").write_text(dump(config))
    return Path("run")


def planned(run: str, *training: str):
    return plan.read_config(run, plan._parser().parse_args([]), training)


FILE = ("--config", "run/config.yaml")
READERS = {
    "train --config": lambda run: train.read(FILE),
    "train --config, with the images": lambda run: train.read((*FILE, "--data=/own"), 100),
    "train --config, behind a recipe": lambda run: train.read(("--recipe=vit_b32", *FILE)),
    "the size of its data": lambda run: depends_on_data(FILE),
    "train --init-from": lambda run: train.read(("--init-from", "run", "--data=/own"), 100),
    "train --init-from a checkpoint": lambda run: train.read(("--init-from", "run/checkpoints/00000002", "--data=/o")),
    "resume": lambda run: check_config((run / "config.yaml").read_text(), load("run/config.yaml"), path=run),
    "validate": lambda run: validate.read(["run"]),
    "validate a checkpoint": lambda run: validate.read(["run/checkpoints/00000002"]),
    "validate --config": lambda run: validate.read([*FILE, "--init-from=w.pt"]),
    "plan": lambda run: planned("run"),
    "plan --config": lambda run: planned("", *FILE),
    "benchmark": lambda run: resident.read_config(FILE),
    "report": lambda run: report(["run"]),
    "report diff": lambda run: diff.compare_options(*2 * [load(str(RunFolder(run).check().config))]),
    "the end of a run": lambda run: summary.describe(run, num_steps=2),
    "export": lambda run: card(create_model(weights="run"), hub.find("run"), run, licence="mit"),
    "predict": lambda run: create_model(weights="run"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_run_folder_of_somebody_else_runs_no_code(run, reader):
    READERS[reader](run)
    assert not Path("harm").exists()


@pytest.mark.parametrize("text", ["recipe: notes.py:recipe", "recipe: ./notes.py:recipe\nrun: {seed: 1}"])
def test_a_config_that_is_not_whole_needs_its_code_on_the_command_line(run, text):
    Path("short.yaml").write_text(text)
    with pytest.raises(ValueError, match="code: to run it, give --recipe (.*notes.py:recipe) as well") as refused:
        train.read(["--config", "short.yaml"])
    assert not Path("harm").exists()
    recipe = re.search(r"--recipe (\S+)", str(refused.value))[1]  # the remedy to the letter
    assert train.read(["--config", "short.yaml", "--recipe", recipe]).model.name == "vit_nano32"


@pytest.mark.parametrize("read", [train.read, resident.read_config, lambda argv: planned("", *argv), validate.read])
def test_the_file_that_the_command_line_names_is_run(run, read):
    read(["--recipe", "notes.py:recipe", "--init-from=w.pt"])
    assert Path("harm").exists()


DEEP = "[" * 20_000
JSON = {  # a file of JSON that others may have written -> how it is read
    "config.json": lambda file: hub.find(file.parent),
    "manifest.json": lambda file: hub.find(file.parent),
    "starts.jsonl": lambda file: read_starts(file.parent),
    ".lock": lambda file: run_lock._read(file),
    "real.json": lambda file: imagenet_real._read(str(file), num_classes=10),
    "classes.json": lambda file: class_names(SimpleNamespace(names=(), class_names=(), files=[str(file)])),
    shard_check.PLANS[0]: lambda file: list(shard_check._recorded([str(file.parent)], "train")),
}


@pytest.mark.parametrize("name", JSON)
def test_json_that_is_nested_too_deeply_is_a_sentence_or_nothing(tmp_path, name):
    save_weights(create_model("vit_nano32", img_size=64, num_classes=10), tmp_path / "model.safetensors")
    (tmp_path / name).write_text(DEEP)
    try:
        assert not JSON[name](tmp_path / name)
    except ValueError as error:
        assert str(tmp_path) in str(error) and len(str(error)) < 400
    assert name != "manifest.json" or "not readable" in why_invalid(tmp_path)


def test_the_tests_that_security_md_names_are_there():
    text = (ROOT / "SECURITY.md").read_text()
    assert [name for name in re.findall(r"`(tests/\S+\.py)`", text) if not (ROOT / name).exists()] == []
    assert len(text.splitlines()) <= 80
