"""Sphinx makes the pages of this project and checks links between its files: sphinx-build -W -c docs . build/docs"""

project = "largebatch"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "examples/README.md",
    "largebatch/benchmark/NOTES.md",
    "largebatch/parallel/README.md",
    "mpi_scripts/README.md",
    "tests/NOTES.md",
    "tests/README.md",
    "tests/reliability/README.md",
    "zoo/README.md",
]
myst_heading_anchors = 3
html_theme = "furo"
