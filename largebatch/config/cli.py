"""The two written forms of a config, command line and YAML, and the comparison of two configs.

A recipe (largebatch/recipes) gives the defaults. A YAML file (--config) replaces some of them, and the options of the
command line come last. The result is written to the run folder, and --config reads it back. jsonargparse parses both.
It is imported when first used, because benchmarks read recipes on machines that do not have it.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from largebatch.config.checks import check, without_effect
from largebatch.config.sections import OptimConfig, TrainConfig

if TYPE_CHECKING:
    import jsonargparse

ALIASES = {
    "--model": "--model.name",
    "--data": "--data.path",
    "--img-size": "--model.img_size",
    "--init-from": "--model.weights",
}


def make_parser(*, prog: str, description: str = "") -> "jsonargparse.ArgumentParser":
    """Return the parser of all dotted options."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file of options, such as a run folder's config.yaml")
    parser.add_class_arguments(TrainConfig)
    return parser


def set_defaults(parser: "jsonargparse.ArgumentParser", config: TrainConfig) -> None:
    """Make the values of `config` the parser's defaults."""
    parser.set_defaults(options(config))


def expand_aliases(argv: Sequence[str]) -> list[str]:
    """Replace the short options (`--model X`, `--img-size=64`) by their dotted ones."""
    expanded = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        expanded.append(ALIASES.get(name, name) + equals + value)
    return expanded


def parse(
    argv: Sequence[str], *, choose_recipe: Callable[[Mapping[str, Any]], TrainConfig], prog: str, description: str = ""
) -> TrainConfig:
    """Read a command line into a checked config.

    choose_recipe: returns the defaults for the options that the command line gives, by dotted name.
    ValueError for an unknown option, with the nearest known one, and for a value that is not allowed.
    """
    import jsonargparse

    parser = make_parser(prog=prog, description=description)
    argv = expand_aliases(argv)
    try:
        given = parser.parse_args([word for word in argv if word not in ("-h", "--help")], defaults=False)
        recipe = choose_recipe(vars(given.as_flat()))
        set_defaults(parser, replace(recipe, optim=for_optimizer(recipe.optim, given.get("optim.name"))))
        values = parser.parse_args(argv)
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ValueError(explain(error, parser)) from None
    config = to_config(parser, values)
    check(config)
    idle = without_effect(config)
    if idle and not values.get("config"):  # those in a file are reported when the ranks have started
        raise ValueError(idle[0])
    return config


def for_optimizer(optim: OptimConfig, name: str | None) -> OptimConfig:
    """The section of a recipe if the command line chooses optimizer `name`.

    For another optimizer it loses the options that only the recipe's optimizer uses; lamb and apex_lamb share theirs.
    """
    lambs = ("lamb", "apex_lamb")
    if name is None or name == optim.name or (name in lambs and optim.name in lambs):
        return optim
    return replace(optim, preset=None, betas=None, eps=None, momentum=None, trust_coefficient=None)


def to_config(parser: "jsonargparse.ArgumentParser", values: "jsonargparse.Namespace") -> TrainConfig:
    """Build the dataclasses from parsed values."""
    sections = {key: value for key, value in vars(parser.instantiate(values)).items() if key != "config"}
    return TrainConfig(**sections)


def explain(error: Exception, parser: "jsonargparse.ArgumentParser") -> str:
    """Turn an error of the parser into one sentence, with the nearest known option if one is misspelt."""
    text = " ".join(str(error).split())
    in_group = re.search(r"Group '([\w.]+)' does not accept option '([\w.\-]+)'", text)
    stray = re.search(r"unrecognized arguments: --([\w.\-]+)", text)
    unknown = ".".join(in_group.groups()) if in_group else stray[1] if stray else ""
    if not unknown:
        return text
    known = [action.dest for action in parser._actions if action.dest != "help"]
    guesses = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
    hint = f"did you mean --{guesses[0]}?" if guesses else "--help lists the options."
    return f"There is no option {unknown}; {hint}"


def dump(config: TrainConfig) -> str:
    """Write a config as YAML, with every option; `load` reads it back."""
    parser = make_parser(prog="largebatch.train")
    set_defaults(parser, config)
    return parser.dump(parser.get_defaults(), skip_unset=False)


def load(path: str) -> TrainConfig:
    """Read a YAML file that `dump` wrote."""
    return parse(["--config", path], choose_recipe=lambda _: TrainConfig(), prog="largebatch.train")


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
