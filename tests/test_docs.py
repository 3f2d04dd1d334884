"""The pages of docs/ say what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = [path for folder in ("largebatch", "zoo", "mpi_scripts") for path in (ROOT / folder).rglob("*")]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["options.md", "recipes.md"])
def test_a_generated_page_is_up_to_date(generate, page):
    assert (DOCS / page).read_text() == generate.PAGES[page](), "run python docs/generate.py"


def test_the_messages_of_troubleshooting_are_those_of_the_code():
    """Each is a part of a message without its values; examples of values are left out."""
    text = "\n".join(path.read_text() for path in SOURCES if path.suffix in (".py", ".sh"))
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # a message may go on in the next line
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [part for row in rows for part in re.findall(r"`([^`]+)`", row) if not part.startswith("--")]
    assert len(messages) > 15
    assert not [message for message in messages if message not in text]


def test_the_index_lists_every_page():
    index = (DOCS / "index.md").read_text()
    listed = re.search(r"```\{toctree\}\n:maxdepth: 1\n\n(.*?)```", index, re.DOTALL)[1].split()
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")
