"""The two written forms of a config, command line and YAML, and the comparison of two configs.

A recipe gives the defaults; YAML files (--config) and options of the command line replace them in their order. Only
YAML needs a package.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

from largebatch.arguments import NoPath, expanded, expect_utf8, local
from largebatch.config import words
from largebatch.config.checks import check, without_effect
from largebatch.config.help import ALIASES, Answer, Page, answer
from largebatch.config.sections import OptimConfig, TrainConfig
from largebatch.config.values import types_of, value_of, with_values

FILE = "config"
PATHS = dict.fromkeys(("recipe", "model.weights", "data.quarantine", "run.folder"), local)
PATHS |= dict.fromkeys(("data.path", "checkpoint.mirror"), expanded)
DEPTH = 2  # points in the longest name of an option
EXPECTED = "expected lines such as 'run:' and, indented below, 'seed: 1'."


def parse(
    argv: Sequence[str], *, choose_recipe: Callable[[Mapping[str, Any]], TrainConfig], page: Page = Page()
) -> TrainConfig:
    """Return the checked config of a command line; ValueError for a mistake, Answer if it asks for a text.

    choose_recipe: returns the defaults for the given options, by dotted name. page: the short help.
    """
    expect_utf8()
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
    """Return the options of a command line, and its requests: help, perhaps on a word, or print_config."""
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
    return checked(config, given_options(argv))


def checked(config: TrainConfig, given: Mapping[str, Any], *, from_file: bool = False) -> TrainConfig:
    """Return a config with other values, by dotted name; ValueError if they are not allowed together."""
    config = with_values(config, given)
    check(config)
    idle = without_effect(config)
    if idle and not from_file:  # `start.doubtful` reports those of a file
        raise ValueError(idle[0])
    return config


# -- command line --------------------------------------------------------------------------------------------


def given_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command line gives, by dotted name; the last one counts."""
    known = types_of(TrainConfig)
    found: dict[str, Any] = {}
    given = [*pairs(argv)]
    modern = words.modern(dict(given))  # the command of an older run still resumes it
    for name, texts in given:
        if name == FILE:
            found |= read_file(texts)
            continue
        if name in words.GONE and (name in modern or texts == words.GONE[name][0]):
            continue
        if name not in known:
            raise ValueError(unknown(name, known, place=f"There is no option {name}"))
        found[name] = _value(name, texts, known[name], option=f"--{name}")
    for name in modern.keys() & known.keys():
        found[name] = _value(name, modern[name], known[name], option=f"--{name}")
    return found


def _value(name: str, given: Any, kind: Any, *, option: str) -> Any:
    value = value_of(given, kind, option=option)
    try:
        return PATHS[name](value) if name in PATHS else value
    except NoPath as error:
        raise NoPath(f"{option}: {error}") from None


def typed(argv: Sequence[str], option: str) -> list[str]:
    """Return the texts that the command line itself gives for an option, or as --config."""
    return [expanded(text) for name, text in pairs(requests(argv)[0]) if name == option]


def pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each option: --name=text, --name text, --name 0.9 0.95, or --switch, which is "true"."""
    given = list(argv)
    while given:
        name, equals, text = given.pop(0).partition("=")
        if not name.startswith("--") or name == "--":
            raise ValueError(
                f"{name!r} stands alone on the command line: expected --option value, such as --model vit_b32"
                f"{_advice(name)}."
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


def _advice(word: str) -> str:
    """Return the advice on a word that stands alone."""
    if word.endswith((".yaml", ".yml")):
        return f"; a file of options is --config {word}"
    return "; a value with a space stands in quotes" if not word.startswith("-") else ""


def unknown(name: str, known: Mapping[str, Any], *, place: str) -> str:
    if any(option.startswith(f"{name}.") for option in known):
        inside = [option for option in known if option.startswith(f"{name}.")]
        first = f"{name}.size" if f"{name}.size" in inside else inside[0]
        return f"{place}: {name} is a section of options, such as --{first}; --help lists them."
    return f"{place}; {words.hint(name, [*known, *ALIASES])}"


# -- YAML ----------------------------------------------------------------------------------------------------


def read_file(path: str) -> dict[str, Any]:
    try:
        if (file := Path(expanded(path))).is_fifo() or file.is_char_device():  # to read it may have no end
            raise OSError(0, "it is a FIFO or a device")
        return read_text(file.read_text(), place=path)
    except OSError as error:
        raise ValueError(f"--config is {path}, which cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"--config is {path}, which is not a text: expected a YAML file of options.") from None


def read_text(text: str, *, place: str) -> dict[str, Any]:
    """Return the values of a YAML text, by dotted name; place: the file, for an error.

    A scalar is read as on a command line: YAML would take 10:13 and 0123 for other numbers.
    """
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ValueError(f"{place} is not YAML: {problem}{where}.") from None
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply for a config: {EXPECTED}") from None
    if root is not None and root.id != "mapping":
        raise ValueError(f"{place} holds no options: {EXPECTED}")
    known, found = types_of(TrainConfig), dict[str, Any]()
    nodes = list(_flat("", root, place=place)) if root else []
    texts = {name: _plain(node) for name, node in nodes}
    modern = words.modern(texts)
    for name in modern.keys() & known.keys() - texts.keys():
        found[name] = _value(name, modern[name], known[name], option=f"{place}: {name}")
    for name, node in nodes:
        if name in modern and modern[name] is None or name in words.GONE and texts[name] == words.GONE[name][0]:
            continue
        if name not in known:
            raise ValueError(unknown(name, known, place=f"{place}: There is no option {name}"))
        if name in found:
            raise ValueError(f"{_line(node, place)}: {name} stands there for the second time: leave one of them out.")
        null = "null" if type(None) in get_args(known[name]) else ""
        given = modern.get(name) or _texts(node, place=place, null=null)
        found[name] = _value(name, given, known[name], option=f"{place}: {name}")
    return found


def _flat(prefix: str, section: Any, *, place: str) -> Iterator[tuple[str, Any]]:
    """Yield name and node of each option; not deeper than sections, as a text may refer to itself."""
    _refuse_objects(section, place)
    for key, node in section.value:
        name = f"{prefix}{key.value if key.id == 'scalar' else '?'}"
        if node.id == "mapping" and name.count(".") < DEPTH:
            yield from _flat(f"{name}.", node, place=place)
        else:
            yield name, node


def _plain(node: Any) -> str:
    """Return a scalar, or a list of scalars, as on a command line; "" for another node."""
    inside = node.value if node.id == "sequence" else [node]
    return ",".join(str(one.value) for one in inside) if all(one.id == "scalar" for one in inside) else ""


def _texts(node: Any, *, place: str, null: str, inside: bool = False) -> Any:
    """Return a text, or a list of texts, for `value_of`; null: the text for no value."""
    _refuse_objects(node, place)
    if node.id == "scalar":
        return null if node.tag.endswith(":null") and node.style is None else node.value
    if node.id == "mapping" or inside:
        raise ValueError(
            f"{_line(node, place)}: there is a value within a value: expected a number, a text, or a list of these."
        )
    return [_texts(one, place=place, null=null, inside=True) for one in node.value]


def _refuse_objects(node: Any, place: str) -> None:
    if not node.tag.startswith("tag:yaml.org,2002:") or ":python" in node.tag:
        raise ValueError(f"{_line(node, place)}: {node.tag} would make an object: expected a value without a tag.")


def _line(node: Any, place: str) -> str:
    return f"{place}, line {node.start_mark.line + 1}"


def dump(config: TrainConfig) -> str:
    """Return a config as YAML, with every option; `load` reads it back."""
    import yaml

    sections = {name: value for name, value in asdict(config).items() if name in TrainConfig.__dataclass_fields__}
    return yaml.safe_dump(_lists(sections), sort_keys=False, allow_unicode=True)


def _lists(value: Any) -> Any:
    """Replace tuples, which YAML does not have, by lists."""
    if isinstance(value, dict):
        return {name: _lists(inside) for name, inside in value.items()}
    return list(value) if isinstance(value, tuple) else value


def load(path: str) -> TrainConfig:
    return checked(TrainConfig(), read_file(path), from_file=True)


def load_text(text: str, *, place: str) -> TrainConfig:
    """Return the config of a text that `dump` wrote, perhaps in another version."""
    return checked(TrainConfig(), read_text(text, place=place), from_file=True)


# -- configs -------------------------------------------------------------------------------------------------


def for_optimizer(optim: OptimConfig, name: str | None) -> OptimConfig:
    """Return a recipe's section for optimizer `name`, without options that only the recipe's own optimizer uses."""
    if name is None or name == optim.name:
        return optim
    return replace(optim, preset=None, betas=None, eps=None, second_moment_half_life="")


def options(config: TrainConfig) -> dict[str, Any]:
    return {name: attrgetter(name)(config) for name in types_of(TrainConfig)}


def differences(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ, by dotted name, each with both values."""
    left, right = options(one), options(other)
    return {name: (value, right[name]) for name, value in left.items() if "." in name and value != right[name]}
