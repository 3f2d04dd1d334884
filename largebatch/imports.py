"""Why a program could not import a module: it is not installed, or a file of the same name hides it.

At its start this file imports only modules that Python itself has imported: such files also hide Python's own.
"""

import os
import sys
from types import TracebackType

OURS = ("largebatch", "zoo", "__main__")


def explain_import(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print one sentence about a failed import, and end with code 2; one word for Ctrl-C; else Python's traceback."""
    if sentence := why_not_imported(error):
        sys.stderr.write(f"largebatch: {sentence}\n")
        sys.exit(2)
    if kind is KeyboardInterrupt:
        sys.stderr.write("\nlargebatch: interrupted\n")
    else:
        sys.__excepthook__(kind, error, traceback)


def why_not_imported(error: BaseException) -> str:
    """Return a sentence on a file that hides a module, a missing package, or a second NCCL; else ""."""
    passed = _files_of(error)
    for name, file in _hiding():
        if f"'{name}'" in str(error) or file in passed:
            remedy = "unset PYTHONPATH" if os.path.dirname(file) in _on_variable() else "export PYTHONSAFEPATH=1"
            return f"{file} hides the module {name} that other packages need: rename this file, or {remedy}."
    if isinstance(error, ModuleNotFoundError) and error.name:
        lacks = f"this program needs the package {error.name}, which {sys.executable} does not have"
        return f"{lacks}: {_remedy_for(error.name)}."
    if symbol := str(error).partition(": undefined symbol: nccl")[2]:
        return f"another NCCL than torch's is loaded and lacks nccl{symbol}: unset LD_PRELOAD, or install torch's anew."
    return ""


def _hiding() -> list[tuple[str, str]]:
    """Return (name, file) of the modules of the working folder and PYTHONPATH that exist elsewhere as well."""
    from importlib.machinery import PathFinder

    first = {os.getcwd(), *_on_variable()}
    others = [folder for folder in sys.path if os.path.abspath(folder) not in first]
    found = []
    for name, module in list(sys.modules.items()):
        file = (getattr(module, "__file__", None) or "").removesuffix("/__init__.py")
        if "." not in name and name not in OURS and os.path.dirname(file) in first:
            if name in sys.stdlib_module_names or PathFinder.find_spec(name, others):
                found.append((name, file))
    return found


def _on_variable() -> list[str]:
    return [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _files_of(error: BaseException) -> set[str]:
    files, traceback = set(), error.__traceback__
    while traceback:
        files.add(traceback.tb_frame.f_code.co_filename.removesuffix("/__init__.py"))
        traceback = traceback.tb_next
    return files


def _remedy_for(package: str) -> str:
    from shlex import quote

    from largebatch.process.installer import SCRIPT, install_command, installed_from

    activate = SCRIPT.parents[1] / ".venv" / "bin" / "activate"
    if activate.exists() and sys.prefix != str(activate.parents[1]):
        return f"activate the environment that has it, `. {quote(str(activate))}`"
    if package == "horovod":  # pip alone would build it without torch and MPI, or not at all
        return f"install it with `{install_command()}`, or start the ranks with torchrun, which needs none"
    if SCRIPT.exists():
        return f"install it with `{install_command()}`"
    source = quote(f"{installed_from() or 'largebatch'}[train]")
    return f"install this package's requirements with `pip install {source}`, and then Horovod"
