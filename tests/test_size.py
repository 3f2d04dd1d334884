"""The size of the package only falls: each figure has a limit, the one that the commit before this one reached.

A commit that needs more raises a limit, and says by how much, for what, and what it removed instead. One that removes
something lowers it. `python -m pytest -n 0 -s tests/test_size.py` prints all figures.
"""

import ast
import dataclasses
from collections import Counter
from pathlib import Path

from largebatch.config import TrainConfig, options

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("largebatch", "zoo") for path in (ROOT / package).rglob("*.py"))
CLASSES = {"Trainer": "largebatch/engine.py", "Communicator": "largebatch/comm/communicator.py"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
LIMITS: dict[str, int] = {}


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
