"""The programs beside training say a mistake on their command line in one sentence."""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from largebatch import config, train, validate
from largebatch.__main__ import PROGRAMS
from largebatch.files.cache import cache_folder
from largebatch.plan import __main__ as plan


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("plan --gpus abc", "--gpus is 'abc': expected a whole number."),
        ("plan --epochs many", "--epochs is 'many': expected a number."),
        ("plan validate", "the following arguments are required: TABLE; --help lists the options."),
        ("reproduce", "the following arguments are required: experiment; --help lists the options."),
        ("reproduce digits --epoch 3", "unrecognized arguments: --epoch 3; --help lists the options."),
        ("benchmark optimizer --threads two", "--threads is 'two': expected a whole number."),
        ("benchmark optimizer --modle vit_b32", "unrecognized arguments: --modle vit_b32; --help lists the options."),
        ("report --out runs", "unrecognized arguments: --out; --help lists the options."),
        ("predict weights image.png --top many", "--top is 'many': expected a whole number."),
        ("export weights", "the following arguments are required: TARGET; --help lists the options."),
        ("doctor --limit-s long", "--limit-s is 'long': expected a number."),
        ("doctor --print", "--print needs hosts; name them, as in --hosts a:2,b:2; --help lists the options."),
        ("pack digits out --shards few", "--shards is 'few': expected a whole number."),
        ("pack check --threads 1", "the following arguments are required: data; --help lists the options."),
    ],
)
def test_a_mistake_is_one_sentence(line, sentence, capsys):
    program, *words = line.split()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"largebatch.{program}.__main__").main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"largebatch: {sentence}\n"


NAMES = "Python reads the names of files as {} here: expected UTF-8. Set PYTHONUTF8=1 in the environment."
COMMANDS = ["report diff", "plan validate", "benchmark step", "benchmark page", "pack check", "pack token-labels"]


IN_TURN = """
import contextlib, importlib, io, json, sys
for program, *words in json.loads(sys.argv[1]):
    module = importlib.import_module(f"largebatch.{program}")
    module = module if hasattr(module, "main") else importlib.import_module(f"largebatch.{program}.__main__")
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = module.main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


def in_turn(lines, *, before=(), **environment):
    """The exit code and the stderr of each line, all in one process: training ignores signals when it has ended."""
    command = [*before, sys.executable, "-c", IN_TURN, json.dumps([line.split() for line in lines])]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    answers = dict(zip(lines, map(json.loads, ended.stdout.splitlines())))
    assert len(answers) == len(lines), ended
    return answers


def test_every_program_needs_names_in_utf8():
    lines = [f"{line} --help" for line in [*sorted(PROGRAMS.keys() - {"benchmark"}), *COMMANDS]]
    for line, answer in in_turn(lines, LC_ALL="C", PYTHONUTF8="0").items():
        assert answer == [2, f"largebatch: {NAMES.format('ascii')}\n"], line


def test_what_the_sentence_on_names_asks_for_is_enough():
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    for more, code, error in [({}, 2, f"largebatch: {NAMES.format('ascii')}\n"), ({"PYTHONUTF8": "1"}, 0, "")]:
        command = [sys.executable, "-m", "largebatch.plan"]
        ended = subprocess.run(command, env=environment | more, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (code, error), ended


FILE = "largebatch: {} cannot be read or written: Permission denied.\n"
OF_RUN = "largebatch: --run.folder is {}, which cannot be written (Permission denied): choose a folder that this user"


def test_every_program_names_a_file_that_this_user_may_not_use(tmp_path):
    """In one process: the last one, training, begins a session."""
    shut, weights = tmp_path / "shut", tmp_path / "w.pt"
    torch.save({}, weights)
    shut.mkdir(mode=0)
    lines = {
        f"predict {shut} a.png": FILE.format(shut / "model.safetensors"),
        f"export {shut} {tmp_path / 'out'}": FILE.format(shut / "model.safetensors"),
        f"report {shut}": FILE.format(shut / "config.yaml"),
        f"report diff {shut} {shut}": FILE.format(shut / "config.yaml"),
        f"plan {shut}": FILE.format(shut / "config.yaml"),
        f"plan --picture {shut / 'a.png'}": FILE.format(shut / "a.png"),
        f"plan --calibrate {shut / 'a.csv'}": "--calibrate is {}, which cannot be read: Permission denied.",
        f"pack digits {shut / 'out'}": FILE.format(shut / "out/packing.json"),
        f"pack check {shut}": FILE.format(shut / "data_batch_1.bin"),
        f"benchmark page {shut}": FILE.format(shut),
        f"validate {shut}": FILE.format(shut / "config.yaml"),
        f"train --init-from {shut}": FILE.format(shut / "config.yaml"),
        f"train --recipe {shut / 'mine.py'}": FILE.format(shut / "mine.py"),
        f"train --run.folder {shut / 'a/b'}": OF_RUN.format(shut / "a/b"),
    }
    # What permissions say does not hold for root with these two capabilities.
    drop = "-dac_override,-dac_read_search"
    as_user = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.geteuid() == 0 else []
    answers = in_turn(lines, before=as_user)
    for line, sentence in lines.items():
        code, said = answers[line]
        assert code == 2 and sentence.format(shut / "a.csv") in said and "Traceback" not in said, (line, said)


HOME = "/home/of/nobody"


@pytest.mark.parametrize(
    "read, options",
    [
        (train.read, ["run.folder", "data.path", "model.weights", "data.quarantine"]),
        (lambda argv: validate.read([*argv, "--init-from=w.pt"])[0], ["data.path", "run.folder"]),
        (lambda argv: plan.read_config("", plan._parser().parse_args([]), argv), ["data.path", "run.folder"]),
    ],
)
def test_a_path_of_an_option_or_of_a_file_begins_at_home(tmp_path, monkeypatch, read, options):
    monkeypatch.setenv("HOME", HOME)
    for option in options:
        (tmp_path / "mine.yaml").write_text(f"{option}: ~/x y\n")
        for argv in ([f"--{option}=~/x y"], [f"--{option}", "~/x y"], ["--config", str(tmp_path / "mine.yaml")]):
            assert config.options(read(argv))[option] == f"{HOME}/x y"
        with pytest.raises(ValueError) as refused:
            read([f"--{option}=~no.such.user/x"])
        assert str(refused.value) == (
            f"--{option}: '~no.such.user/x' begins with ~, and there is no such home folder: "
            "a folder of this name is ./~no.such.user/x."
        )
        assert config.options(read([f"--{option}=./~no.such.user/x"]))[option] == "./~no.such.user/x"


def test_all_options_that_are_paths_begin_at_home():
    """Their meaning says so; --recipe FILE.py:function is in tests/test_sized_recipes.py."""
    texts = {name: option.text for name, option in config.help.all_options(config.TrainConfig()).items()}
    found = {name for name, text in texts.items() if re.match(r"(folder|file|list|run folder|second place)\b", text)}
    assert found | {"recipe"} == {*config.cli.PATHS}


def test_the_files_of_home(tmp_path, monkeypatch):
    """Of --config, of a run, of a recipe and of the cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.py").write_text("import largebatch\ndef mine():\n    return largebatch.TrainConfig()\n")
    (tmp_path / "config.yaml").write_text(config.dump(train.read(["--recipe=~/my.py:mine"])))
    assert train.read(["--config=~/config.yaml"]).recipe == f"{tmp_path}/my.py:mine"
    assert validate.read(["~", "--csv", "~/runs.csv"]) == (
        replace(train.read(["--config=~/config.yaml"]), run=config.RunConfig(folder=str(tmp_path))),
        validate.Flags(csv=f"{tmp_path}/runs.csv"),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert cache_folder() == tmp_path / "cache/largebatch"


@pytest.mark.parametrize(
    "program, line, names",
    [
        ("predict", "~/w.pt ~/a.png", ["weights", "images"]),
        ("export", "~/run ~/out", ["source", "target"]),
        ("plan", "--picture ~/a.png --calibrate ~/c.csv", ["picture", "calibrate"]),
        ("reproduce", "digits --data ~/c --output ~/out", ["data", "output"]),
    ],
)
def test_every_path_of_the_other_programs_begins_at_home(monkeypatch, program, line, names):
    monkeypatch.setenv("HOME", HOME)
    args = vars(importlib.import_module(f"largebatch.{program}.__main__")._parser().parse_args(line.split()))
    given = [one for name in names for one in (args[name] if isinstance(args[name], list) else [args[name]])]
    assert given and all(str(one).startswith(f"{HOME}/") for one in given)
