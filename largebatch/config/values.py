"""Values of options: read from texts, checked, described and replaced."""

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import field, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
SYNONYMS = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def limited(default: Any, allowed: Callable[[Any], bool], expected: str) -> Any:
    """Return the field of an option whose value `check_values` checks."""
    return field(default=default, metadata={"allowed": allowed, "expected": expected})


def byte_size(text: str) -> int:
    """Return the number of bytes in "200 GB", "1.5 TiB" or "0"; -1 for another text."""
    found = re.fullmatch(r"(\d+\.?\d*) ?([kmgt]?)(i?)b?", text.lower(), re.ASCII)
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")) if found else -1


def at_least(default: float | None, low: int) -> Any:
    return limited(default, lambda value: value >= low, f"at least {low}")


def check_values(section: Any, prefix: str = "--") -> None:
    """Raise ValueError for the first value that its field does not allow."""
    for one in fields(section):
        value = getattr(section, one.name)
        if is_dataclass(value):
            check_values(value, f"{prefix}{one.name}.")
        elif value is not None and one.metadata and not one.metadata["allowed"](value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{prefix}{one.name} is {shown}: expected {one.metadata['expected']}.")


def types_of(section: type) -> dict[str, Any]:
    """Return the type of every option by its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(section).items():
        inside = types_of(hint) if is_dataclass(hint) and isinstance(hint, type) else None
        found |= {name: hint} if inside is None else {f"{name}.{option}": inside[option] for option in inside}
    return found


def value_of(given: Any, hint: Any, *, option: str) -> Any:
    """Convert the given text to this type; the ValueError names the option."""
    try:
        return read(given, hint)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{option} is {given!r:.80}: expected {expected(hint)}.") from None


def read(given: Any, hint: Any) -> Any:
    """Return the value of a text, or of a list of texts; ValueError, KeyError or TypeError for a wrong one."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        for part in sorted(parts, key=lambda part: part is not types.NoneType):  # a str would take "null" as well
            try:
                return read(given, part)
            except (ValueError, KeyError, TypeError):
                continue
        raise ValueError(given)
    if kind in (tuple, list):
        words = given if isinstance(given, list) else given.strip("[]()").replace(",", " ").split()
        return kind(read(*pair) for pair in zip(words, parts if kind is tuple else parts * len(words), strict=True))
    if not isinstance(given, str):
        raise TypeError(given)
    if hint is types.NoneType:
        return {"null": None, "none": None}[given.lower()]
    if kind is Literal:
        values = {str(value).lower(): value for value in parts}
        return values[SYNONYMS.get(given.lower(), given.lower())]
    if hint is bool:
        return BOOLEANS[given.lower()]
    if hint is int and (number := float(given)).is_integer():
        value = int(number) if "e" in given.lower() or "." in given else int(given)
    else:
        value = hint(given)
    if hint in (int, float) and not abs(value) < (2**63 if hint is int else math.inf):
        raise ValueError(given)
    return value


def expected(hint: Any) -> str:
    """Describe the texts of a type."""
    if hint is types.NoneType:
        return "null"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(expected(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"[{', '.join(expected(part) for part in get_args(hint))}]"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(hint, "a list")


def choices(hint: Any) -> list[str]:
    """Return the texts of a type that has few."""
    if hint is bool:
        return ["true", "false"]
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return [text for part in parts for text in choices(part)]
    return [str(value) for value in parts if value != ""] if get_origin(hint) is Literal else []


def with_values(section: Any, given: Mapping[str, Any]) -> Any:
    for name, value in given.items():
        section = with_value(section, name, value)
    return section


def with_value(section: Any, name: str, value: Any) -> Any:
    first, _, rest = name.partition(".")
    return replace(section, **{first: with_value(getattr(section, first), rest, value) if rest else value})
