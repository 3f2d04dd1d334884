"""Write the pages that come from the code: python docs/generate.py makes docs/recipes.md and docs/options.md.

tests/test_docs.py compares the pages with what this program would write.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from largebatch.config import TrainConfig  # noqa: E402
from largebatch.recipes import RECIPES  # noqa: E402

RECIPES_HEAD = """# Recipes

This page is generated from `largebatch/recipes/`. A recipe is a complete set of options; `--recipe NAME` takes it, and every
option of the command line replaces one of its values. `python -m largebatch.train --recipe NAME --help` prints them all.

| recipe | global batch | optimizer | peak learning rate | length | image |
|---|---|---|---|---|---|
"""


def recipes() -> str:
    """Return the page of all recipes: a table, then the docstring of each function, which has its sources."""
    rows = [row(name, recipe()) for name, recipe in RECIPES.items()]
    return RECIPES_HEAD + "\n".join(rows) + "\n\n" + "\n".join(sections())


def row(name: str, config: TrainConfig) -> str:
    optim = config.optim.name + (f" ({config.optim.preset})" if config.optim.preset else "")
    cells = (
        f"`{name}`",
        f"{config.data.global_batch_size:,}",
        optim,
        f"{config.optim.lr:g}",
        config.run.duration,
        f"{config.model.img_size} px",
    )
    return f"| {' | '.join(cells)} |"


def sections() -> list[str]:
    """Return a section for each function; recipes that one function makes share it."""
    names: dict[Callable, list[str]] = {}
    for name, recipe in RECIPES.items():
        names.setdefault(recipe.func if isinstance(recipe, partial) else recipe, []).append(name)
    return [
        f"## {', '.join(f'`{name}`' for name in of_function)}\n\n{markdown(inspect.getdoc(function) or '')}\n"
        for function, of_function in names.items()
    ]


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown: lines that are indented, or begin with a launcher, are a block of code."""
    lines, code = [], False
    for line in docstring.splitlines():
        is_code = line.startswith(("    ", "horovodrun", "mpirun"))
        if line.strip() and is_code != code:
            lines.append("```" + ("text" if is_code else ""))
            if not is_code:
                lines.append("")
            code = is_code
        lines.append(line.removeprefix("    ") if is_code else line)
    return "\n".join([*lines, "```"] if code else lines)


PAGES = {"recipes.md": recipes}


if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write())
