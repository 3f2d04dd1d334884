"""The two written forms of a config, command line and YAML, and the comparison of two configs.

A recipe (largebatch/recipes) gives the defaults. A YAML file (--config) replaces some of them, and so do the options of
the command line, in their order. The result is written to the run folder, and --config reads it back. All but files
needs the standard library alone; PyYAML reads and writes them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from largebatch.config import words
from largebatch.config.checks import check, without_effect
from largebatch.config.help import ALIASES, Answer, Page, answer
from largebatch.config.sections import OptimConfig, TrainConfig
from largebatch.config.values import types_of, value_of, with_values

FILE = "config"


def parse(
    argv: Sequence[str], *, choose_recipe: Callable[[Mapping[str, Any]], TrainConfig], page: Page = Page()
) -> TrainConfig:
    """Read a command line into a checked config.

    choose_recipe: returns the defaults for the options that the command line gives, by dotted name.
    page: the short help.
    ValueError for an unknown option, with the nearest known one, and for a value that is not allowed. Answer if the
    command line asks for help, or for the config.
    """
    argv, asked = requests(argv)
    given = given_options(argv)
    recipe = choose_recipe(given)
    recipe = replace(recipe, optim=for_optimizer(recipe.optim, given.get("optim.name")))
    if "help" in asked:
        raise answer(asked["help"], with_values(recipe, given), page)
    config = checked(recipe, given, from_file=any(name == FILE for name, _ in pairs(argv)))
    if "print_config" in asked:
        raise Answer(dump(config).rstrip())
    return config


def requests(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into its options, and what it asks for: help, perhaps on a word, or print_config."""
    words, asked, left = list(argv), {}, []
    while words:
        given = words.pop(0)
        name, _, topic = given.partition("=")
        if name in ("-h", "--help"):
            asked["help"] = topic or (words.pop(0) if words and not words[0].startswith("-") else "")
        elif name in ("--print_config", "--print-config"):
            asked["print_config"] = ""
        else:
            left.append(given)
    return left, asked


def apply(config: TrainConfig, argv: Sequence[str]) -> TrainConfig:
    """Return a checked config with the options of a command line; ValueError, one sentence, for a mistake."""
    return checked(config, given_options(argv))


def checked(config: TrainConfig, given: Mapping[str, Any], *, from_file: bool = False) -> TrainConfig:
    """Return a config with other values, by dotted name, if they are allowed and fit together."""
    config = with_values(config, given)
    check(config)
    idle = without_effect(config)
    if idle and not from_file:  # those in a file are reported when the ranks have started
        raise ValueError(idle[0])
    return config


# -- command line --------------------------------------------------------------------------------------------


def given_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command line gives, by dotted name; the last one of an option counts."""
    known = types_of(TrainConfig)
    found: dict[str, Any] = {}
    for name, texts in pairs(argv):
        if name == FILE:
            found |= read_file(texts)
            continue
        if name not in known:
            raise ValueError(unknown(name, known, place=f"There is no option {name}"))
        found[name] = value_of(texts, known[name], option=f"--{name}")
    return found


def typed_recipes(argv: Sequence[str]) -> list[str]:
    """Return the recipes that a command line names itself, and not in a file: only these may be code."""
    return [text for name, text in pairs(requests(argv)[0]) if name == "recipe"]


def pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name, without dashes, and the text of each option: --name=text, --name text, --name 0.9 0.95, --switch.

    The text of a switch is "true".
    """
    given = list(argv)
    while given:
        name, equals, text = given.pop(0).partition("=")
        if not name.startswith("--") or name == "--":
            raise ValueError(
                f"{name!r} stands alone on the command line: expected --option value, such as --model vit_b32."
            )
        name = ALIASES.get(name.removeprefix("--"), name.removeprefix("--"))
        kind = types_of(TrainConfig).get(name)
        several = "tuple" in str(kind) or "list" in str(kind)
        texts = [text] if equals else []
        while not equals and given and not given[0].startswith("--") and (several or not texts):
            texts.append(given.pop(0))
        if not texts and (name == FILE or kind is not None and bool not in (kind, *get_args(kind))):
            raise ValueError(f"--{name} stands alone on the command line: expected --{name} and a value.")
        yield name, " ".join(texts) if texts else "true"


def unknown(name: str, known: Mapping[str, Any], *, place: str) -> str:
    """Return the sentence on an option that does not exist."""
    if any(option.startswith(f"{name}.") for option in known):
        first = next(option for option in known if option.startswith(f"{name}."))
        return f"{place}: {name} is a section of options, such as --{first}; --help lists them."
    return f"{place}; {words.hint(name, [*known, *ALIASES])}"


# -- YAML ----------------------------------------------------------------------------------------------------


def read_file(path: str) -> dict[str, Any]:
    """Return the values of a YAML file, by dotted name."""
    try:
        return read_text(Path(path).read_text(), place=path)
    except OSError as error:
        raise ValueError(f"--config is {path}, which cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"--config is {path}, which is not a text: expected a YAML file of options.") from None


def read_text(text: str, *, place: str) -> dict[str, Any]:
    """Return the values of a YAML text, by dotted name; place: its name, for an error."""
    import yaml

    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ValueError(f"{place} is not YAML: {getattr(error, 'problem', error)}{where}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{place} holds no options: expected lines such as 'run:' and, indented below, 'seed: 1'.")
    known, found = types_of(TrainConfig), {}
    for name, value in _flat("", content):
        if name not in known:
            raise ValueError(unknown(name, known, place=f"{place}: There is no option {name}"))
        found[name] = value_of(_texts(value), known[name], option=f"{place}: {name}")
    return found


def _flat(prefix: str, content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _texts(value: Any) -> Any:
    """Return a value of YAML as it would stand on a command line."""
    if isinstance(value, list):
        return [_texts(one) for one in value]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def dump(config: TrainConfig) -> str:
    """Write a config as YAML, with every option; `load` reads it back."""
    import yaml

    return yaml.safe_dump(_lists(asdict(config)), sort_keys=False, allow_unicode=True)


def _lists(value: Any) -> Any:
    """Return a value with lists in the place of tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {name: _lists(inside) for name, inside in value.items()}
    return list(value) if isinstance(value, tuple) else value


def load(path: str) -> TrainConfig:
    """Read a YAML file that `dump` wrote."""
    return checked(TrainConfig(), read_file(path), from_file=True)


def load_text(text: str, *, place: str) -> TrainConfig:
    """Return the config of a text that `dump` wrote, perhaps by another version; place: its name, for an error."""
    return checked(TrainConfig(), read_text(text, place=place), from_file=True)


# -- configs -------------------------------------------------------------------------------------------------


def for_optimizer(optim: OptimConfig, name: str | None) -> OptimConfig:
    """The section of a recipe if the command line chooses optimizer `name`.

    For another optimizer it loses the options that only the recipe's optimizer uses; lamb and apex_lamb share theirs.
    """
    lambs = ("lamb", "apex_lamb")
    if name is None or name == optim.name or (name in lambs and optim.name in lambs):
        return optim
    return replace(optim, preset=None, betas=None, eps=None, momentum=None, trust_coefficient=None, rest=None)


def options(config: TrainConfig) -> dict[str, Any]:
    """Return the value of every option by its dotted name."""
    return _dotted("", asdict(config))


def _dotted(prefix: str, section: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _dotted(f"{prefix}{name}.", value) if isinstance(value, dict) else {prefix + name: value}
    return found


def differences(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the dotted options that differ between two configs, each with both values."""
    left, right = options(one), options(other)
    return {name: (value, right[name]) for name, value in left.items() if "." in name and value != right[name]}
