"""Write the pages that come from the code: python docs/generate.py makes docs/recipes.md and docs/options.md.

tests/test_docs.py compares the pages with what this program would write.
"""

import csv
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from largebatch.config import TrainConfig  # noqa: E402
from largebatch.config.help import VALUES, all_options, sections, typed  # noqa: E402
from largebatch.recipes import RECIPES  # noqa: E402

RECIPES_HEAD = """# Recipes

This page is generated from `largebatch/recipes/`. A recipe is a complete set of options; `--recipe NAME` takes it, and
every option of the command line replaces one of its values. `--recipe NAME --print_config` prints them all.

A section below says what differs from the published run. A name ends in `_like` if that may change the result. Recipes
that others have published have a table of their settings, published and here, with the test of each. The published ones
are typed by hand in `docs/published.csv`. Our values come from the code; for words alone, the
test of the row holds them.

| recipe | global batch | optimizer | peak learning rate | length | image |
|---|---|---|---|---|---|
"""


OPTIONS_HEAD = """This page is generated from `largebatch/config/`. `python -m largebatch.train --help all` prints the
same with the values of a recipe, and `--print_config` those of a command line. `--config FILE` reads options from YAML,
such as the config.yaml of a run folder."""


# -- recipes -----------------------------------------------------------------------------------------------------


def recipes() -> str:
    """Return the page of all recipes: a table, then the docstring of each function, which has its sources."""
    rows = [row(name, recipe()) for name, recipe in RECIPES.items()]
    return RECIPES_HEAD + "\n".join(rows) + "\n\n" + "\n".join(described())


def row(name: str, config: TrainConfig) -> str:
    optim = config.optim.name + (f" ({config.optim.preset})" if config.optim.preset else "")
    cells = (
        f"`{name}`",
        f"{config.data.global_batch_size:,}",
        optim,
        f"{peak(config):.3g}",
        config.run.duration,
        f"{config.model.img_size} px",
    )
    return f"| {' | '.join(cells)} |"


def peak(config: TrainConfig) -> float:
    """Return the peak learning rate at the global batch of the recipe."""
    schedule = config.schedule
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[schedule.scaling]
    return config.optim.lr * (config.data.global_batch_size / (schedule.reference_batch_size or 1)) ** power


def described() -> list[str]:
    """Return a section for each function; recipes that one function makes share it."""
    names: dict[Callable, list[str]] = {}
    for name, recipe in RECIPES.items():
        names.setdefault(recipe.func if isinstance(recipe, partial) else recipe, []).append(name)
    tables = published()
    return [
        f"## {', '.join(f'`{name}`' for name in of_function)}\n\n{markdown(inspect.getdoc(function) or '')}\n"
        + tables.get(of_function[0], "")
        for function, of_function in names.items()
    ]


def published() -> dict[str, str]:
    """Return the tables of published.csv, each by the first recipe of several; the others' values follow its own."""
    tables: dict[str, str] = {}
    for names, setting, theirs, ours, test in published_rows():
        first, *others = names
        also = ", ".join(f"`{name}`" for name in others)
        head = f"\nSettings, also of {also}, in this order where they differ:\n\n" if others else "\nSettings:\n\n"
        head += "| setting | published | here | test |\n|---|---|---|---|\n"
        tables[first] = tables.get(first, head) + f"| {setting} | {theirs} | {ours} | {test.rpartition('/')[2]} |\n"
    return tables


def published_rows() -> list[tuple[list[str], str, str, str, str]]:
    """Return the recipes, setting, published value, value here and test of each row of published.csv."""
    with open(DOCS / "published.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        (names := row["recipes"].split(), row["setting"], row["published"], filled(row["ours"], names), row["test"])
        for row in rows
    ]


def filled(text: str, names: list[str]) -> str:
    """Replace {section.option} by the values of recipes, one if they are all the same, and {peak}, {first}, {lowest} by
    their rates."""

    def values(match: re.Match) -> str:
        path, found = match[1], []
        for name in names:
            config = RECIPES[name]()
            rates = {"peak": 1.0, "first": config.schedule.start, "lowest": config.schedule.floor}
            value = rates[path] * peak(config) if path in rates else reduce(getattr, path.split("."), config)
            found.append(written(value))
        return found[0] if len({*found}) == 1 else ", ".join(found)

    return re.sub(r"\{([\w.]+)\}", values, text)


def written(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(written, value))
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown: lines that are indented, or begin with a launcher, are a block of code."""
    blocks = []
    for block in docstring.split("\n\n"):
        is_code = block.startswith(("    ", "horovodrun", "mpirun"))
        blocks.append(f"```text\n{textwrap.dedent(block)}\n```" if is_code else block)
    return "\n\n".join(blocks)


# -- options -----------------------------------------------------------------------------------------------------


def options() -> str:
    """Return the page of all options: a section of the config in each table, with the defaults of no recipe."""
    lines = ["# Options", "", f"{OPTIONS_HEAD} {VALUES}"]
    for section, text in sections().items():
        lines += ["", f"## {section}", "", text, "", "| option | default | meaning |", "|---|---|---|"]
        for name, option in all_options(TrainConfig()).items():
            if name.startswith(f"{section}."):
                form, value = escaped(option.usage().rpartition(" ")[2]), escaped(typed(option.value))
                names = "<br>".join(f"`--{one}`" for one in option.names)
                lines.append(f"| {names} {form} | {value} | {escaped(option.text)} |")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


PAGES = {"recipes.md": recipes, "options.md": options}


if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write())
