"""The command that installs this package, for messages, and the notes of install.sh."""

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

SCRIPT = Path(__file__).parents[2] / "mpi_scripts" / "install.sh"
MARKER = Path(sys.prefix) / "largebatch-installed"  # install.sh notes there what it has installed


def install_command(*options: str, settings: str = "", script: Path = SCRIPT) -> str:
    """Return the command with install.sh. settings: variables before it, such as CUDA=12.6."""
    command, own = "mpi_scripts/install.sh", script.parents[1] / ".venv"
    if script.exists():
        command = command if Path(command).exists() else shlex.quote(str(script))
        if MARKER.exists() and Path(sys.prefix).resolve() != own.resolve():
            settings = f"VENV={shlex.quote(sys.prefix)} {settings}".strip()
    else:  # a wheel does not have it
        source = installed_from()
        folder = shlex.quote(str(source)) if source and source.is_dir() else "FOLDER_OF_THE_SOURCES"
        command = f"{folder}/{command}"
    return " ".join(word for word in (settings, command, *options) if word)


def noted(marker: Path = MARKER) -> dict[str, str]:
    return dict(line.split("=", 1) for line in marker.read_text().splitlines()) if marker.exists() else {}


def installed_from() -> Path | None:
    """Return the folder or archive from which pip installed this package, if it is there."""
    try:
        noted = distribution("largebatch").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    path = Path(unquote(urlsplit(json.loads(noted)["url"]).path)) if noted else None
    return path if path and path.exists() else None


def foreign_gpu(capability: tuple[int, int], marker: Path = MARKER) -> str:
    """Return the architectures of Horovod's kernels if none runs on a GPU of this capability, otherwise "".

    CUDA runs code of the same major and no greater minor version, and compiles that of the last for every later GPU.
    """
    listed = noted(marker).get("architectures", "")
    numbers = [int(number) for number in listed.split(",") if number.isdigit()]
    gpu = 10 * capability[0] + capability[1]
    runs = any(number // 10 == capability[0] and number <= gpu for number in numbers) or gpu >= max(numbers, default=0)
    return "" if runs else listed
