"""The catalogue of breaks fits the sources and the tests; the `evidence` tier shows that tests notice each break."""

import ast
import re
import subprocess
import sys

import pytest
from mutants import ROOT, Mutant, Outcome, read_catalogue, verdict

MUTANTS = read_catalogue()
FEWEST = {  # breaks in each folder of the product
    "largebatch": 40,
    "largebatch/optim": 8,
    "largebatch/data": 20,
    "largebatch/parallel": 15,
    "largebatch/recipes": 4,
    "largebatch/doctor": 5,
    "largebatch/benchmark": 4,
    "zoo": 8,
}


def test_every_text_to_break_occurs_once_and_what_is_broken_still_compiles():
    for mutant in MUTANTS:
        broken = mutant.apply((ROOT / mutant.file).read_text())
        if mutant.file.endswith(".py"):
            ast.parse(broken, filename=mutant.file)
    with pytest.raises(ValueError, match="setup.cfg: the text to break occurs 0 times, expected once: 'no such text'"):
        Mutant("setup.cfg", "no such text", "", "nothing", ()).apply((ROOT / "setup.cfg").read_text())


def test_every_named_test_exists():
    defined: dict[str, set[str]] = {}
    for mutant in MUTANTS:
        assert mutant.tests, mutant
        for test in mutant.tests:
            file, _, name = test.partition("::")
            names = defined.setdefault(file, set(re.findall(r"^ *def (test_\w+)", (ROOT / file).read_text(), re.M)))
            assert name.partition("[")[0] in names, test
        assert not mutant.launcher or all(test.startswith("tests/mpi/ranks/") for test in mutant.tests), mutant


def test_every_folder_of_the_product_is_broken_often():
    assert len(MUTANTS) >= 280
    assert len({mutant.breaks for mutant in MUTANTS}) == len({(m.file, m.text) for m in MUTANTS}) == len(MUTANTS)
    for folder, fewest in FEWEST.items():
        assert sum(mutant.folder == folder for mutant in MUTANTS) >= fewest, folder


@pytest.mark.parametrize(
    "outcome, hang, word",
    [
        (Outcome(1, 1.0, ""), False, "killed"),
        (Outcome(0, 1.0, ""), False, "survived"),
        (Outcome(2, 1.0, "ImportError"), False, "error"),  # the tests could not be collected
        (Outcome(4, 1.0, "not found"), False, "error"),  # no such test
        (Outcome(5, 1.0, "no tests ran"), False, "error"),
        (Outcome(-11, 1.0, ""), False, "error"),
        (Outcome(None, 1.0, ""), False, "error"),
        (Outcome(None, 1.0, ""), True, "killed"),
        (None, False, "error"),  # red without the break
    ],
)
def test_a_break_is_killed_by_a_failed_test_alone(outcome, hang, word):
    assert verdict(Mutant("file", "text", "becomes", "breaks", ("test",), hang=hang), outcome)[0] == word


@pytest.mark.evidence
def test_no_break_survives():
    done = subprocess.run([sys.executable, "-m", "tests.mutants"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(MUTANTS)} killed, 0 survived, 0 errors of {len(MUTANTS)} in " in done.stdout
