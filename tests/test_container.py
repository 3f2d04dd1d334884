"""The Dockerfile and the commands for container engines, parsed: no engine runs here."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "mpi_scripts"
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
# of each engine's documentation, those in use; an option with "=" or a value after it is in the second set
OPTIONS = {
    "docker build": (set(), {"-f", "-t", "--build-arg"}),
    "docker run": ({"--rm", "--ipc=host"}, {"--gpus", "--ulimit"}),
    "enroot import": (set(), {"-o"}),
    "apptainer build": (set(), set()),
    "apptainer exec": ({"--nv"}, {"--bind", "--pwd"}),
}
PYXIS = {"--container-image", "--container-mounts", "--container-workdir"}  # github.com/NVIDIA/pyxis/wiki/Usage


def instructions() -> list[tuple[str, str]]:
    """(name, the rest) of each instruction of the Dockerfile."""
    lines = [line for line in (SCRIPTS / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def named(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_every_instruction_is_known_and_from_comes_first():
    names = [name for name, _ in instructions()]
    assert set(names) <= INSTRUCTIONS
    assert names[:2] == ["ARG", "FROM"] and named("FROM") == ["${BASE}"] and named("ARG")[0].startswith("BASE=")


def test_every_source_exists_and_is_sent_to_the_build():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for rest in named("COPY"):
        *sources, target = rest.split()
        for source in sources:
            assert (ROOT / source).exists() and f"!{source}" in ignored, source
            assert target in ("./", source)


def test_what_it_runs_exists():
    for rest in [*named("RUN"), *map(" ".join, map(eval_list, named("CMD")))]:
        assert subprocess.run(["bash", "-n", "-c", rest], capture_output=True).returncode == 0, rest
        for script in re.findall(r"mpi_scripts/\S+", rest):
            assert os.access(ROOT / script, os.X_OK), script
    install = [rest for rest in named("RUN") if "install.sh" in rest][0]
    documented = (SCRIPTS / "install.sh").read_text()
    for variable in re.findall(r"(\w+)=\S+ ", install.partition("mpi_scripts/install.sh")[0]):
        assert f"#   {variable} " in documented or variable.startswith("PIP_"), variable
    assert "OPERATIONS=nccl" in named("ARG")


def eval_list(text: str) -> list[str]:
    """["a", "b"], as CMD has it."""
    words = re.findall(r'"([^"]*)"', text)
    assert text == "[" + ", ".join(f'"{word}"' for word in words) + "]"
    return words


def test_the_image_has_what_the_scripts_look_for_in_it():
    (folder,) = named("WORKDIR")
    batch = (SCRIPTS / "train_slurm.sbatch").read_text()
    assert f"bind={folder}/mpi_scripts/bind.sh python={folder}/.venv/bin/python" in batch
    (path,) = named("ENV")
    assert path.startswith(f"PATH={folder}/.venv/bin:")


def options_of(command: list[str]) -> tuple[str, list[str]]:
    """(program and verb, its options), up to the first word that is neither an option nor its value."""
    verb = " ".join(command[:2])
    flags, valued = OPTIONS[verb]
    found, words = [], iter(command[2:])
    for word in words:
        if not word.startswith("-"):
            break
        assert word in flags | valued, f"{word} of {verb}"
        found.append(word)
        if word in valued:
            assert not next(words).startswith("-"), command
    return verb, found


def test_the_commands_of_the_readme(scripts_readme):
    commands = scripts_readme("Containers")
    verbs = [options_of(shlex.split(command))[0] for command in commands if not command.startswith("IMAGE=")]
    assert verbs == ["docker build", "docker run", "enroot import", "apptainer build"]
    for command in commands:
        if command.startswith("IMAGE="):
            assert "sbatch" in command and (ROOT / re.findall(r"mpi_scripts/\S+", command)[0]).exists()


@pytest.mark.parametrize("line", re.findall(r"^#\s+(?:Usage:\s+)?((?:docker|apptainer) .*)$",
                                            (SCRIPTS / "Dockerfile").read_text(), re.MULTILINE))
def test_the_commands_of_the_dockerfile(line):
    options_of(shlex.split(line))


def test_the_options_of_pyxis_and_apptainer_in_the_batch_script():
    batch = (SCRIPTS / "train_slurm.sbatch").read_text()
    assert set(re.findall(r"--container-[a-z-]+", batch)) == PYXIS
    (line,) = re.findall(r"apptainer exec .*", batch)
    assert options_of(shlex.split(line.partition(")")[0]))[1] == ["--nv", "--bind", "--pwd"]
