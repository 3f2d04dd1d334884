"""The command `largebatch`: its programs, its answers, and what these do not load."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from largebatch.__main__ import PROGRAMS
from largebatch.config import load_text
from largebatch.imports import why_not_imported

ROOT = Path(__file__).parents[1]
LOADED = "loaded:"  # a process ends with this line and the packages that it has loaded
PROGRAM = f"""
import atexit, runpy, sys
atexit.register(lambda: print({LOADED!r}, *sorted({{name.partition(".")[0] for name in sys.modules}}), flush=True))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
SLOW = {"torch", "horovod", "timm", "nvidia", "zoo", "numpy", "mpi4py"}


def command(*words: str, folder: Path, module: str = "largebatch", **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `largebatch WORDS` in a folder; it must have loaded nothing that is slow."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    output, _, loaded = found.stdout.rpartition(LOADED)
    assert loaded and not SLOW & {*loaded.split()}, found
    return found.returncode, output, found.stderr


def test_the_programs_are_listed_with_a_sentence_each(tmp_path):
    code, listed, errors = command(folder=tmp_path)
    assert (code, errors) == (0, "") and command("--help", folder=tmp_path)[1] == listed
    for name, text in PROGRAMS.items():
        assert f"largebatch {name} " in listed and text in listed and find_spec(f"largebatch.{name}"), name


def test_versions_are_printed_without_loading_anything(tmp_path):
    code, printed, _ = command("--version", folder=tmp_path)
    assert code == 0 and printed.startswith("largebatch 0.") and ", torch " in printed and ", horovod 0." in printed


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("trian", "There is no program 'trian': did you mean train?"),
        ("Validate", "There is no program 'Validate': did you mean validate?"),
        ("xyz", "There is no program 'xyz': expected train, find_lr, find_batch, validate, "),
        ("--model vit_b32", "--model stands before a program: expected one first, as in largebatch train --model ..."),
        ("train --modle vit_b32", "There is no option modle; did you mean --model?"),
        ("train --help teapot", "--help teapot: no option says this word"),
        ("benchmark speed", "There is no benchmark 'speed': expected optimizer, loader, model, step, parallel, sc"),
        ("validate nowhere", "nowhere is not a run folder: expected a config.yaml in it"),
        ("validate --lr 3", "There is no option lr; did you mean --optim.lr?"),
    ],
)
def test_a_mistake_is_one_line_at_once_and_leaves_nothing(tmp_path, line, sentence):
    code, output, errors = command(*line.split(), folder=tmp_path)
    assert (code, output, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("largebatch: ") and sentence in errors
    assert [*tmp_path.iterdir()] == []


def test_a_program_answers_as_its_module_does_and_on_one_rank(tmp_path):
    line = ["train", "--model", "vit_b16", "--data", "/imagenet", "--print_config"]
    code, printed, errors = command(*line, folder=tmp_path)
    assert (code, errors) == (0, "") and load_text(printed, place="x").recipe == "vit_b16"
    assert command(*line[1:], folder=tmp_path, module="largebatch.train") == (0, printed, "")
    second = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert command("train", "--help", folder=tmp_path, **second) == (0, "", "")
    assert command(folder=tmp_path, **second) == (0, "", "") and [*tmp_path.iterdir()] == []


# -- imports that fail ---------------------------------------------------------------------------------------------


def imports(*command: str, folder: Path, **environment: str) -> str:
    """What a command prints that ends with code 2."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done
    return done.stderr


@pytest.mark.parametrize("name", ["random.py", "numpy.py", "numpy/__init__.py"])
@pytest.mark.parametrize("start", [("-m", "largebatch.report"), ("-m", "largebatch", "report")])
def test_a_file_that_hides_a_module_is_named(tmp_path, name, start):
    """In the working folder, or on PYTHONPATH; what the sentence advises helps."""
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    hidden = str(file).removesuffix("/__init__.py")
    command, mine = (sys.executable, *start, "no/run"), str(tmp_path / "mine")
    says = f"largebatch: {hidden} hides the module {Path(hidden).stem} that other packages need: rename this"
    assert imports(*command, folder=tmp_path / "mine") == f"{says} file, or export PYTHONSAFEPATH=1.\n"
    assert "hides" not in imports(*command, folder=tmp_path / "mine", PYTHONSAFEPATH="1")
    assert imports(*command, folder=tmp_path / "elsewhere", PYTHONPATH=mine) == f"{says} file, or unset PYTHONPATH.\n"
    assert "hides" not in imports(*command, folder=tmp_path / "elsewhere")


@pytest.mark.parametrize("start", [("-m", "largebatch.train"), ("-m", "largebatch", "train")])
def test_a_python_without_torch_is_told_of_the_environment(start, tmp_path, monkeypatch):
    """-S leaves out site-packages, as if .venv were not activated."""
    said = imports(sys.executable, "-S", *start, folder=ROOT)
    assert said.startswith("largebatch: this program needs the package torch, which ") and said.count("\n") == 1
    activate = ROOT / ".venv" / "bin" / "activate"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    advice = f"activate the environment that has it, `. {activate}`"
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert not activate.exists() or advice in why_not_imported(missing)
    assert why_not_imported(ImportError("cannot import name 'x' from 'y'")) == ""
    preloaded = ImportError("/a/torch/lib/libtorch_cuda.so: undefined symbol: ncclDevCommDestroy")
    assert "another NCCL than torch's is loaded and lacks ncclDevCommDestroy: unset" in why_not_imported(preloaded)


def test_ctrl_c_ends_a_program_without_a_traceback():
    """By the signal, so that a loop of a shell ends, too."""
    program = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv = ['-m']; "
        "import largebatch; os.kill(os.getpid(), signal.SIGINT); signal.pause()"
    )
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "\nlargebatch: interrupted\n")
