"""The texts of --help. The text of an option stands below it in sections.py.

A page has the options that most people need; `--help all` has every option, `--help optim` those of a section, and
`--help accumulation` those that say this word.
"""

import ast
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

from largebatch.config.sections import TrainConfig
from largebatch.config.values import choices, types_of

ALIASES = {"model": "model.name", "data": "data.path", "img-size": "model.img_size", "init-from": "model.weights"}
SHORT = {option: alias for alias, option in ALIASES.items()}
VALUES = (
    "An option is --name value or --name=value, and the last one counts. A switch alone is true; null or none is no "
    "value; two numbers are 0.9,0.95 or 0.9 0.95. A duration has a unit: '5 epochs', '300 steps', '1e6 images', '50 %'."
)
COMMON = {
    "--config FILE": "YAML file of options, such as config.yaml of a run folder; options behind it replace its own",
    "--print_config": "print every option with its value as YAML, and do nothing else",
    "--help [all|SECTION|WORD]": "all options, those of a section, or those that say a word, such as accumulation",
}
COLUMN = 30  # where the meanings begin
LINES = 2  # of a meaning in the short help


class Answer(Exception):
    """A text, such as that of --help, that a program prints instead of its work."""


@dataclass(frozen=True)
class Page:
    """The short help of a program: a description with examples, options by group, and options of its own."""

    about: str = ""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """An option with its type, its meaning and its value."""

    name: str
    kind: Any
    text: str
    value: Any

    @property
    def names(self) -> list[str]:
        return [SHORT[self.name], self.name] if self.name in SHORT else [self.name]

    def usage(self, *, short: bool = False) -> str:
        names = ", ".join(f"--{name}" for name in self.names[: 1 if short else 2])
        return f"{names} {_form(self.kind)}"

    def lines(self, width: int, *, short: bool = False) -> Iterator[str]:
        """Yield the lines of help; short: as many clauses of the meaning as fit into two lines."""
        default, room = f" [{typed(self.value)}]", width - COLUMN
        text = self.text
        while short and len(text) + len(default) > LINES * room - 8 and (cut := max(map(text.rfind, ("; ", ". ")))) > 0:
            text = text[:cut]
        yield from _entry(self.usage(short=short), text + default, width)


def answer(word: str, config: TrainConfig, page: Page) -> Answer:
    """Return the text of --help WORD; ValueError if no option says the word."""
    width = max(60, min(shutil.get_terminal_size((120, 24)).columns, 120))
    options = all_options(config)
    if word:
        return Answer("\n".join(_about_word(word, options, width)))
    lines = [page.about.strip(), ""]
    for title, names in page.groups.items():
        lines += [title, *(line for name in names for line in options[name].lines(width, short=True)), ""]
    if page.own:
        lines += ["Options of this program alone", *_entries(page.own, width), ""]
    lines += ["More", *_entries(COMMON, width), ""]
    closing = f"In brackets is the value that this command line gives, in recipe {config.recipe or 'none'}. {VALUES}"
    lines += textwrap.wrap(f"{closing} Sections: {', '.join(sections())}.", width)
    return Answer("\n".join(lines))


def _about_word(word: str, options: Mapping[str, Option], width: int) -> Iterator[str]:
    wanted = word.lower().lstrip("-").removesuffix(".")
    chosen = {name: text for name, text in sections().items() if wanted in ("all", name)}
    found = [option for option in options.values() if wanted in f"{option.usage()} {option.text}".lower()]
    if not chosen and not found:
        raise ValueError(
            f"--help {word}: no option says this word; expected all, a word, or a section: {', '.join(sections())}."
        )
    for name in ["recipe"] * (wanted == "all") if chosen else [option.name for option in found]:
        yield from options[name].lines(width)
    for section, text in chosen.items():
        yield from ("", *textwrap.wrap(f"{section}: {text}", width))
        for name, option in options.items():
            if name.startswith(f"{section}."):
                yield from option.lines(width)
    yield from ("", *textwrap.wrap(VALUES, width))


def all_options(config: TrainConfig) -> dict[str, Option]:
    kinds = types_of(TrainConfig)
    return {name: Option(name, kinds[name], text, attrgetter(name)(config)) for name, text in _texts().items()}


@cache
def _texts(section: type = TrainConfig, prefix: str = "") -> dict[str, str]:
    """Return the meaning of every option below a section: the text below it in the source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    below = {
        one.target.id: " ".join(ast.literal_eval(two.value).split())
        for one, two in pairwise(tree.body if isinstance(tree, ast.ClassDef) else [])
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(two, ast.Expr)
    }
    found: dict[str, str] = {}
    for name, kind in get_type_hints(section).items():
        inside = isinstance(kind, type) and is_dataclass(kind)
        found |= _texts(kind, f"{prefix}{name}.") if inside else {prefix + name: below[name]}
    return found


def sections() -> dict[str, str]:
    """Return the meaning of each section."""
    kinds = get_type_hints(TrainConfig).items()
    return {name: (kind.__doc__ or "").strip() for name, kind in kinds if is_dataclass(kind)}


# -- lines ---------------------------------------------------------------------------------------------------


def _entries(entries: Mapping[str, str], width: int) -> Iterator[str]:
    for usage, text in entries.items():
        yield from _entry(usage, text, width)


def _entry(usage: str, text: str, width: int) -> Iterator[str]:
    left, lines = f"  {usage}", textwrap.wrap(text, width - COLUMN, break_long_words=False, break_on_hyphens=False)
    if len(left) > COLUMN - 2:
        yield left
        left = ""
    for line in lines:
        yield f"{left:{COLUMN}}{line}"
        left = ""


def _form(kind: Any) -> str:
    """Return the form of a value, such as N or true|false."""
    if words := choices(kind):
        return "|".join(words)
    parts = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return _form(parts[0])
    if get_origin(kind) is tuple:
        return ",".join(map(_form, parts))
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "N,N,...")


def typed(value: Any) -> str:
    """Return a value as a user would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (tuple, list)):
        return ",".join(f"{one:.4g}" for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
