"""The set-up script: what it says when something is missing, and that a whole .venv is found, not made again.

Each missing thing is faked through PATH or PYTHON, for a folder of the test's own; nothing is downloaded, and
the repository's .venv is only looked at.
"""

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.doctor import installation

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted((ROOT / "mpi_scripts").glob("*.sh")), ROOT / "tests/cluster/install.sh", ROOT / ".ci" / "run"]
INSTALLED = ROOT / ".venv" / "largebatch-installed"
OUR_VARIABLES = ("PYTHON", "MPI", "OPERATIONS", "CXX", "WHEEL_CACHE", "VENV", "MIN_FREE_GB")


@pytest.fixture
def install(tmp_path):
    """A function that runs install.sh on a .venv in tmp_path with the given variables."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        inherited = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
        environment = inherited | {"VENV": str(tmp_path / ".venv"), "PYTHON": sys.executable} | variables
        return subprocess.run(
            [ROOT / "mpi_scripts" / "install.sh", *arguments],
            env=environment,
            timeout=300,
            capture_output=True,
            text=True,
        )

    return run


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def python_where(path: Path, *, pattern: str, action: str) -> str:
    """An interpreter that acts otherwise when its command line holds a text, and else is this one."""
    return program(path, f'case "$*" in *{pattern}*) {action} ;; esac\nexec {sys.executable} "$@"')


def assert_refused(result: subprocess.CompletedProcess, *parts: str) -> None:
    """One sentence on stderr with the given parts, exit code not 0, and no word of success."""
    assert result.returncode == 1, result.stdout + result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("install.sh: ")
    for part in parts:
        assert part in result.stderr
    assert "installed" not in result.stdout


def test_python_too_old(install, tmp_path):
    old = program(tmp_path / "python3", "echo 3.9")
    assert_refused(
        install(PYTHON=old), "Python 3.11, 3.12 or 3.13 is needed", f"{old} is 3.9", "PYTHON=/path"
    )
    assert not (tmp_path / ".venv").exists()


def test_no_python(install):
    assert_refused(install(PYTHON="no-such-python"), "no python3 was found", "apt-get install python3")


def test_no_venv_module(install, tmp_path):
    python = python_where(tmp_path / "python", pattern="ensurepip", action="exit 1")
    assert_refused(install(PYTHON=python), "venv or ensurepip module is missing", "apt-get install python3.")
    assert not (tmp_path / ".venv").exists()


def test_no_headers(install, tmp_path):
    python = python_where(tmp_path / "python", pattern="sysconfig", action="echo /no/such/include; exit 0")
    assert_refused(install(PYTHON=python), "/no/such/include/Python.h", "-dev")


def test_no_compiler(install):
    assert_refused(
        install(CXX="no-such-compiler"), "no C++ compiler was found", "apt-get install g++", "CXX="
    )


def test_compiler_too_old(install, tmp_path):
    old = program(tmp_path / "g++", "echo 'unrecognized option -std=c++17' >&2; exit 1")
    assert_refused(install(CXX=old), "cannot compile and link C++17", "g++ 9 or newer")


@pytest.mark.needs_compiler
def test_disk_full(install, tmp_path):
    assert_refused(install(MIN_FREE_GB="99999999"), "99999999 GB are needed", "VENV=/path/with/room")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    "variables, parts",
    [
        ({"MPI": "mpich"}, ("MPI=mpich is unknown", "MPI=wheel or MPI=system")),
        ({"MPI": "system"}, ("there is no mpirun on PATH", "libopenmpi-dev")),
    ],
)
def test_mpi_choice(install, tmp_path, variables, parts):
    tools = tmp_path / "tools"  # just what the script needs, and no MPI
    tools.mkdir()
    for tool in ("bash", "sh", "dirname", "sed", "head", "mkdir", "flock", "env"):
        (tools / tool).symlink_to(shutil.which(tool) or "/missing")
    assert_refused(install(PATH=str(tools), **variables), *parts)


def test_unknown_option(install):
    assert_refused(install("--rebuild"), "unknown option --rebuild", "--help")


def test_help_names_every_variable(install):
    printed = install("--help").stdout
    assert all(f"  {name} " in printed for name in OUR_VARIABLES)
    assert "set -E" not in printed


@pytest.mark.needs_compiler
def test_a_folder_of_someone_else_is_left_alone(install, tmp_path):
    mine = tmp_path / ".venv" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    assert_refused(install("--force"), "was not made by this script")
    assert mine.read_text() == "precious"


@pytest.mark.needs_compiler
def test_no_network_and_the_half_made_folder(install, tmp_path):
    """pip finds nothing; what it leaves is what it found: no installation, but a folder to begin anew."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    venv = tmp_path / ".venv"
    venv.mkdir()
    for name in ("largebatch-begun", "leftover"):
        (venv / name).touch()
    result = install(**offline)
    assert_refused(result, "pip could not install the packages", "check the network", "install.log")
    assert "is incomplete" in result.stdout and not (venv / "leftover").exists()
    assert (venv / "largebatch-begun").exists() and not (venv / "largebatch-installed").exists()


def test_a_whole_venv_is_found():
    if not INSTALLED.exists():
        pytest.skip("the repository has no .venv of mpi_scripts/install.sh")
    before = INSTALLED.stat().st_mtime_ns
    environment = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
    result = subprocess.run(
        [ROOT / "mpi_scripts" / "install.sh"], env=environment, timeout=300, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "install.sh: found " in result.stdout and "Horovod 0.28.1" in result.stdout
    assert INSTALLED.stat().st_mtime_ns == before


def test_startup_without_activation():
    """.venv/bin/python alone finds the launchers and runs MPI: what a scheduler's job or an editor does."""
    if not INSTALLED.exists():
        pytest.skip("the repository has no .venv of mpi_scripts/install.sh")
    code = (
        "import shutil, horovod.torch as hvd; hvd.init(); "
        "print(shutil.which('mpirun'), hvd.size(), hvd.mpi_threads_supported())"
    )
    environment = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", "-c", code],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    mpirun, size, _ = result.stdout.split()
    assert size == "1"
    if "mpi_choice=wheel" in INSTALLED.read_text():
        assert Path(mpirun).parent == ROOT / ".venv" / "bin"


def test_horovod_takes_the_mpi_of_its_venv(tmp_path, monkeypatch):
    """Also where a cluster's module put another libmpi on LD_LIBRARY_PATH, and in a wheel built elsewhere."""
    if not INSTALLED.exists() or "mpi_choice=wheel" not in INSTALLED.read_text():
        pytest.skip("the repository has no .venv with the MPI of the registry")
    (tmp_path / "libmpi.so.40").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    facts, output = installation.horovod_facts()
    assert "version" in facts, output.stderr
    assert Path(facts["libmpi"]).is_relative_to(ROOT / ".venv")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(script):
    """bash accepts it, it says what it is for, and shellcheck has nothing to say."""
    subprocess.run(["bash", "-n", script], check=True)
    head = script.read_text().split("\n\n")[0]
    assert all(f"# {label}:" in head for label in ("What", "Hardware", "Time", "Prints"))
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: it comes with the test extra of setup.cfg")
    result = subprocess.run(["shellcheck", "-x", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


def test_every_requirement_is_pinned():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lists = (config["options"]["install_requires"], config["options.extras_require"]["test"])
    lines = [line for text in lists for line in text.strip().splitlines()]
    assert len(lines) > 15
    assert [line for line in lines if "==" not in line] == []
