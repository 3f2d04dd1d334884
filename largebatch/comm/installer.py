"""The command that sets an installation up, as messages name it."""

from pathlib import Path

from largebatch import __version__

SCRIPT = Path(__file__).parents[2] / "mpi_scripts" / "install.sh"
SOURCES = f"largebatch-{__version__}"  # the source distribution, which has the script where a wheel has not


def install_command(*options: str, settings: str = "", script: Path = SCRIPT) -> str:
    """Return the command with install.sh; settings: the variables before it, such as CUDA=12.6."""
    words = [settings, "mpi_scripts/install.sh" if script.exists() else f"{SOURCES}/mpi_scripts/install.sh", *options]
    command = " ".join(word for word in words if word)
    return command if script.exists() else f"tar -xf {SOURCES}.tar.gz && {command}"
