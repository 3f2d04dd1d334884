"""SECURITY.md is true: what is read runs no code, and no shell reads a path."""

import ast
import os
import re
from pathlib import Path

import pytest
import torch

from largebatch.config import parse
from zoo import load_weights

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
    assert {file for file, name, _ in calls() if name in UNPICKLE} == {"largebatch/comm/communicator.py"}


def test_no_text_is_run_as_a_command_or_as_code():
    """But for the file that a user names as a recipe: it is a program of his own."""
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
    Path("run.yaml").write_text("run: !!python/object/apply:os.mkdir [harm]\n")
    with pytest.raises(ValueError, match="could not determine a constructor"):
        parse(["--config", "run.yaml"], choose_recipe=lambda given: None)
    assert os.listdir() == ["run.yaml"]


def test_the_tests_that_security_md_names_are_there():
    text = (ROOT / "SECURITY.md").read_text()
    assert [name for name in re.findall(r"`(tests/\S+\.py)`", text) if not (ROOT / name).exists()] == []
    assert len(text.splitlines()) <= 80
