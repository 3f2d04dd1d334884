"""The command lines of the programs beside training: a mistake is one sentence, without argparse's usage."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from largebatch.files.names import on_screen, refuse_secret, why

NO_VALUE = re.compile(r"argument (?P<option>[^:]+): invalid (?P<kind>\w+) value: (?P<value>.+)", re.DOTALL)
EXPECTED = {"int": "a whole number", "float": "a number"}


class NoPath(argparse.ArgumentTypeError, ValueError):
    """A path begins with ~, and there is no such home folder, or is an address with credentials."""


def expect_utf8() -> None:
    """Raise ValueError if Python reads names of files in another encoding than libraries in C++ and Rust."""
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise ValueError(
            f"Python reads the names of files as {encoding} here: expected UTF-8. Set PYTHONUTF8=1 in the environment."
        )


def expanded(text: str) -> str:
    """Return a path with the home folder for ~: a shell leaves it in --option=~/x and in quotes."""
    found = os.path.expanduser(text)
    if found.startswith("~"):
        raise NoPath(f"{text!r} begins with ~, and there is no such home folder: a folder of this name is ./{text}.")
    if "://" in text:
        try:
            refuse_secret(text)
        except ValueError as error:
            raise NoPath(str(error)) from None
    return found


def local(text: str) -> str:
    """Return `expanded` of a path at which files are opened; NoPath for an address, which would become a folder s3:."""
    if "://" in (found := expanded(text)):
        raise NoPath(
            f"{text} is an address, and a file or folder of this host is expected: only --data and "
            "--checkpoint.mirror take an address."
        )
    return found


def take_flags(argv: Sequence[str], flags: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of options beside the config's, such as "--ema" and "--csv FILE", and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.register("type", None, local)
    for flag, _, value in (text.partition(" ") for text in flags):
        if value:
            parser.add_argument(flag, default="")
        else:
            parser.add_argument(flag, action="store_true")
    try:
        found, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from None
    return vars(found), words


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are one sentence."""

    def __init__(self, program: str, text: str | None = None, **given: Any) -> None:
        """program: the words after `python -m largebatch.`; text: the description, printed as it is."""
        if text:
            given |= {"description": text, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(prog=f"python -m largebatch.{program}", allow_abbrev=False, **given)
        self.register("type", None, expanded)
        self.register("type", Path, lambda text: Path(local(text)))

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        try:
            expect_utf8()
        except ValueError as error:
            raise SystemExit(complain(error)) from None
        return super().parse_known_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(complain(sentence(message)))


def complain(mistake: object) -> int:
    """Write a sentence to stderr; return the exit code of a mistake."""
    sys.stderr.write(f"largebatch: {on_screen(why(mistake))}\n")
    return 2


def sentence(message: str) -> str:
    """Return argparse's message as a sentence with the option, the value given and the value expected."""
    if found := NO_VALUE.fullmatch(message):
        kind = EXPECTED.get(found["kind"], f"a {found['kind']}")
        return f"{found['option']} is {found['value']}: expected {kind}."
    return f"{message.rstrip('.')}; --help lists the options."
