"""CONTRIBUTING.md is true: its map is the tree, its answers exist, and its linters are those that CI runs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CALL = re.compile(r"^ *run (flake8|isort|mypy|shellcheck)(.*)$", re.MULTILINE)


def mapped() -> Iterator[tuple[str, str]]:
    """Each path of the map with its description; a folder ends in a slash, and four columns are one level."""
    (block,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    parents: list[str] = []
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        name, _, description = line.strip().partition(" ")
        assert indent % 4 == 0 and indent // 4 <= len(parents), line
        parents = [*parents[: indent // 4], name]
        yield "".join(parents), description.strip()


def test_the_map_has_every_folder_and_every_file_says_what_it_is_for():
    paths = [path.relative_to(ROOT) for package in ("largebatch", "zoo") for path in (ROOT / package).rglob("*.py")]
    folders = sorted({f"{path.parent}/" for path in paths})
    assert sorted(name for name, _ in mapped()) == folders
    assert [name for name, description in mapped() if not description] == []
    assert [str(path) for path in paths if not ast.get_docstring(ast.parse((ROOT / path).read_text()))] == []


def test_every_answer_is_a_function_of_that_file():
    answers = re.findall(r"^\| Where .*\? \| `(.*)`: `(.*)` \|$", TEXT, re.MULTILINE)
    assert len(answers) == 7
    for file, name in answers:
        tree = ast.parse((ROOT / file).read_text())
        assert name in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)], (file, name)


def test_every_file_that_is_named_exists():
    prose = re.sub(r"```text\n.*?```", "", TEXT, flags=re.DOTALL)
    names = set(re.findall(r"`((?:largebatch|zoo|tests|mpi_scripts)/[\w./]*)`", prose))
    for name in names - {"tests/launchers/NAME.txt"}:  # NAME is the reader's
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)]*)\)", prose):
        assert (ROOT / link).exists(), link


def test_no_two_files_of_tests_have_one_name():
    """pytest collects the second one of them only if it is asked for alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_before_a_commit_the_linters_of_ci_run():
    """Each with the same files; CI also shows what isort would change."""
    ci = {name: arguments.split() for name, arguments in CALL.findall((ROOT / ".ci" / "run").read_text())}
    entries = re.findall(r"entry: (\w+)(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    before = {name: arguments.split() for name, arguments in entries}
    assert before.keys() == ci.keys() == {"flake8", "isort", "mypy", "shellcheck"}
    assert before == ci | {"isort": ["--check-only", "."], "shellcheck": []}
    for name in ci:
        assert re.search(rf"^{name}\b", TEXT.replace(" && ", "\n"), re.MULTILINE), name


def test_the_jobs_on_github_are_the_parts_of_ci_run():
    """Together all of them, each once."""
    script, jobs = ((ROOT / name).read_text() for name in (".ci/run", ".github/workflows/ci.yml"))
    parts = re.findall(r"^if wanted (\w+); then$", script, re.MULTILINE)
    assert f"[{' | '.join(parts)}]..." in script and f"^({'|'.join(parts)})$" in script
    assert re.findall(r"\w+", re.findall(r"part: \[(.*)\]", jobs)[0]) == parts
