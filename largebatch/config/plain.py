"""Read dotted options of the command line with the standard library alone, for benchmarks without jsonargparse.

    apply(config, ["--model.img_size=64", "--optim.clip_norm", "null"]) -> the config with these values

It reads the same texts as the parser of `cli`, apart from --config and --help.
"""

import types
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from largebatch.config.checks import check, without_effect
from largebatch.config.cli import expand_aliases, options
from largebatch.config.sections import TrainConfig


def apply(config: TrainConfig, argv: Sequence[str]) -> TrainConfig:
    """Return a checked config with the values of the command line; ValueError, one sentence, for a mistake."""
    for name, text in pairs(argv):
        if name not in options(config):
            close = get_close_matches(name, options(config), n=1, cutoff=0)
            raise ValueError(f"There is no option {name}; did you mean --{close[0]}?")
        config = with_value(config, name.split("."), text, option=f"--{name}")
    check(config)
    if idle := without_effect(config):
        raise ValueError(idle[0])
    return config


def pairs(argv: Sequence[str]) -> list[tuple[str, str]]:
    """Return names, without dashes, and texts of "--name=text" and "--name text"."""
    words, found = iter(expand_aliases(argv)), []
    for word in words:
        name, equals, text = word.partition("=")
        value = text if equals else next(words, None)
        if not name.startswith("--") or value is None:
            raise ValueError(f"{word!r} stands alone on the command line: expected --option value.")
        found.append((name.removeprefix("--"), value))
    return found


def with_value(section: Any, path: Sequence[str], text: str, *, option: str) -> Any:
    """Return a section of a config with a new value for the option at `path`."""
    name, *rest = path
    if rest:
        return replace(section, **{name: with_value(getattr(section, name), rest, text, option=option)})
    hint = get_type_hints(type(section))[name]
    try:
        return replace(section, **{name: read(text, hint)})
    except (ValueError, KeyError):
        raise ValueError(f"{option} is {text!r}: expected {expected(hint)}.") from None


def read(text: str, hint: Any) -> Any:
    """Return the value of a text for an option of this type; ValueError or KeyError if it has none."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint is types.NoneType:
        return {"null": None, "None": None}[text]
    if kind in (Union, types.UnionType):
        for part in sorted(parts, key=lambda part: part is not types.NoneType):  # a str would take "null" as well
            try:
                return read(text, part)
            except (ValueError, KeyError):
                continue
        raise ValueError(text)
    if kind is Literal:
        return {str(value): value for value in parts}[text]
    if kind in (tuple, list):
        words = [word.strip() for word in text.strip("[]()").split(",")]
        return kind(read(*pair) for pair in zip(words, parts if kind is tuple else parts * len(words), strict=True))
    return {"true": True, "false": False}[text.lower()] if hint is bool else hint(text)


def expected(hint: Any) -> str:
    """Describe the texts that `read` takes for a type."""
    if hint is types.NoneType:
        return "null"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(expected(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"[{', '.join(expected(part) for part in get_args(hint))}]"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "a list")
