"""The size of the package only falls: each figure has a limit, what it was when the limit was set.

A commit that needs more raises a limit, and says by how much, for what, and what it removed instead. One that removes
something lowers it. `python -m pytest -n 0 -s tests/test_size.py` prints all figures.
"""

import ast
from collections import Counter
from pathlib import Path

from largebatch.config import TrainConfig, options

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("largebatch", "zoo") for path in (ROOT / package).rglob("*.py"))
CLASSES = {"Trainer": "largebatch/engine.py", "Ranks": "largebatch/ranks/ranks.py"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
LIMITS = {
    "options of training": 93,
    "words of docstrings": 49_920,
    "lines": 37_324,
    "files": 256,
    "methods of Trainer": 22,
    "fields of Trainer": 26,
    "methods of Ranks": 31,
    "fields of Ranks": 4,
    "lines in largebatch": 3_472,
    "lines in largebatch/assembly": 1_015,
    "lines in largebatch/benchmark": 1_722,
    "lines in largebatch/checkpoint": 1_046,
    "lines in largebatch/config": 1_858,
    "lines in largebatch/data": 5_031,
    "lines in largebatch/doctor": 2_131,
    "lines in largebatch/export": 302,
    "lines in largebatch/files": 576,
    "lines in largebatch/hooks": 2_025,
    "lines in largebatch/launch": 1_160,
    "lines in largebatch/native": 466,
    "lines in largebatch/optim": 1_665,
    "lines in largebatch/pack": 809,
    "lines in largebatch/parallel": 2_146,
    "lines in largebatch/plan": 2_366,
    "lines in largebatch/predict": 155,
    "lines in largebatch/process": 286,
    "lines in largebatch/ranks": 2_807,
    "lines in largebatch/recipes": 951,
    "lines in largebatch/report": 1_397,
    "lines in largebatch/reproduce": 1_806,
    "lines in zoo": 2_132,
    "files in largebatch": 25,
    "files in largebatch/assembly": 4,
    "files in largebatch/benchmark": 12,
    "files in largebatch/checkpoint": 5,
    "files in largebatch/config": 12,
    "files in largebatch/data": 25,
    "files in largebatch/doctor": 11,
    "files in largebatch/export": 4,
    "files in largebatch/files": 9,
    "files in largebatch/hooks": 19,
    "files in largebatch/launch": 8,
    "files in largebatch/native": 5,
    "files in largebatch/optim": 9,
    "files in largebatch/pack": 9,
    "files in largebatch/parallel": 13,
    "files in largebatch/plan": 15,
    "files in largebatch/predict": 2,
    "files in largebatch/process": 7,
    "files in largebatch/ranks": 18,
    "files in largebatch/recipes": 9,
    "files in largebatch/report": 10,
    "files in largebatch/reproduce": 14,
    "files in zoo": 11,
}


def figures() -> dict[str, int]:
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    words = 0
    for path in FILES:
        place = path.relative_to(ROOT).parent.as_posix()
        lines[place] += len(path.read_text().splitlines())
        files[place] += 1
        words += sum(len((ast.get_docstring(node) or "").split()) for node in documented(path))
    found = {"options of training": len(options(TrainConfig())), "words of docstrings": words}
    found |= {"lines": lines.total(), "files": files.total()}
    for name, place in CLASSES.items():
        (body,) = (node.body for node in documented(ROOT / place) if getattr(node, "name", "") == name)
        found[f"methods of {name}"] = sum(isinstance(node, FUNCTION) for node in body)
        found[f"fields of {name}"] = sum(isinstance(node, ast.AnnAssign) for node in body)
    found |= {f"lines in {place}": number for place, number in lines.items()}
    return found | {f"files in {place}": number for place, number in files.items()}


def documented(path: Path) -> list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.Module, ast.ClassDef, *FUNCTION)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def test_nothing_grows_beyond_its_limit():
    found = figures()
    print(*(f"{name}: {number:,} of {LIMITS.get(name, 0):,}" for name, number in found.items()), sep="\n")
    assert {name: number for name, number in found.items() if number > LIMITS.get(name, 0)} == {}
