"""Checks of the installation: packages, Horovod, launchers, the compiler."""

import importlib.metadata
import json
import operator
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from largebatch.doctor.result import INSTALL, REINSTALL, Output, Result, run
from largebatch.process.installer import install_command
from largebatch.process.packages import version_of

# zoo is before timm: with a CPU build of torch, timm imports only after zoo.
MODULES = (
    *("torch", "numpy", "PIL", "nvidia.dali", "mpi4py", "zoo", "timm"),
    *("rich", "tensorboard", "matplotlib", "sklearn", "safetensors", "yaml"),
)

# A child process runs this. If it fails, the last name that it printed is the culprit.
IMPORT_EACH = """
import importlib, sys
for module in sys.argv[1:]:
    print(module, flush=True)
    importlib.import_module(module)
"""

COMPARE = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "==": operator.eq}
HARMLESS = {"test", "tests", "examples"}  # common folder names that nobody imports from elsewhere

# A child process runs this. It reads from files for which torch Horovod was built, because it may not load with another
# torch. Then it imports Horovod, which finds missing symbols, and prints its parts and the MPI library that it loads.
# "abi" is the C++ ABI, the layout of std::string: the mangled name of a constructor with such an argument shows it.
HOROVOD_FACTS = """
import ctypes, importlib.util, json, pathlib, re
import torch
def tell(**facts): print("facts " + json.dumps(facts), flush=True)
tell(torch=torch.__version__, torch_abi=bool(torch.compiled_with_cxx11_abi()))
tell(cuda=torch.version.cuda, gpus=torch.cuda.device_count(), nccl=torch.distributed.is_nccl_available())
spec = importlib.util.find_spec("horovod")
if spec and spec.origin:
    home = pathlib.Path(spec.origin).parent
    metadata = home / "metadata.json"
    tell(built_for=json.loads(metadata.read_text()).get("pytorch") if metadata.exists() else None)
    for extension in home.glob("torch/mpi_lib_v2*.so"):
        text = re.search(rb"6StatusC[12]ENS0_10StatusTypeE(Ss|NSt7__cxx11)", extension.read_bytes())
        tell(horovod_abi=text[1] != b"Ss" if text else None)
import horovod, horovod.torch as hvd
tell(
    version=horovod.__version__, libmpi=None, mpi_version=None,
    mpi=bool(hvd.mpi_built()), gloo=bool(hvd.gloo_built()), nccl=bool(hvd.nccl_built()),
)
libraries = re.findall(r" (/.*/libmpi\\.so[^/\\n]*)$", pathlib.Path("/proc/self/maps").read_text(), re.MULTILINE)
if libraries:
    text = ctypes.create_string_buffer(8192)
    ctypes.CDLL(libraries[0]).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    tell(libmpi=libraries[0], mpi_version=text.value.decode(errors="replace"))
"""

# Compiled like the code of torch.compile for --run.compile: a library with OpenMP and Python's header.
COMPILED = "#include <Python.h>\n#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"


class Requirement(NamedTuple):
    """A package and the versions that are allowed, such as >=2,<3."""

    name: str
    versions: str

    def __str__(self) -> str:
        return f"{self.name}{self.versions}"

    def allows(self, version: str) -> bool:
        """Return whether a version is allowed; 2.13.0+cpu is a build of 2.13.0."""
        return all(
            COMPARE[sign](*_aligned(version.partition("+")[0], bound))
            for sign, bound in re.findall(r"([<>=]=?)\s*([\w.]+)", self.versions)
        )


def _aligned(*versions: str) -> Iterator[list[int]]:
    """Yield versions as lists of numbers of one length: 2.13 is 2.13.0."""
    numbers = [[int(number) for number in re.findall(r"\d+", version)] for version in versions]
    for of_one in numbers:
        yield of_one + [0] * (max(map(len, numbers)) - len(of_one))


def required() -> Iterator[Requirement]:
    """Yield what the project requires to train. The doctor also runs where `packaging` is missing."""
    for text in importlib.metadata.requires("largebatch") or []:
        requirement, _, marker = text.partition(";")
        if found := re.fullmatch(r"\s*([\w.-]+)\s*([\w.<>=,\s]*)", requirement):
            if "extra" not in marker or "train" in marker or "horovod" in marker and version_of("horovod"):
                yield _as_installed(Requirement(found[1], found[2].strip()))


def _as_installed(requirement: Requirement) -> Requirement:
    """Return the requirement, or DALI for CUDA 13 in place of CUDA 12 if install.sh has chosen it."""
    other = requirement._replace(name=requirement.name.replace("nvidia-dali-cuda120", "nvidia-dali-cuda130"))
    return other if version_of(other.name) else requirement


def check_versions() -> Result:
    name = "package versions"
    try:
        requirements = list(required())
    except importlib.metadata.PackageNotFoundError:
        return Result(name, False, cause=f"this project is not installed for {sys.executable}", fix=REINSTALL)
    missing = [requirement for requirement in requirements if not version_of(requirement.name)]
    if missing:
        names = [str(requirement) for requirement in missing]
        cause = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"
        return Result(name, False, cause=cause, fix=f"{sys.executable} -m pip install {shlex.join(names)}")
    for requirement in requirements:
        version = importlib.metadata.version(requirement.name)
        if not requirement.allows(version):
            cause = f"{requirement} is needed, but {version} is installed"
            return Result(name, False, cause=cause, fix=f"{sys.executable} -m pip install '{requirement}'")
    return Result(name, True, f"{len(requirements)} packages are in the ranges that the metadata of largebatch allow")


def importable(folder: Path) -> set[str]:
    modules = {path.stem for path in folder.glob("*.py")}
    return (modules | {path.parent.name for path in folder.glob("*/__init__.py")}) - HARMLESS


def check_shadowing() -> Result:
    """Check that nothing in the working folder or on PYTHONPATH hides an installed module of the same name."""
    name = "import path"
    of_path = [Path(folder).resolve() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    folders = [] if os.environ.get("PYTHONSAFEPATH") else [Path.cwd()]
    site_packages = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    known = set(sys.stdlib_module_names).union(*(importable(folder) for folder in site_packages))
    for folder in [*of_path, *folders]:
        shadows = sorted(importable(folder) & known) if folder not in site_packages else []
        if shadows:
            cause = f"{', '.join(shadows[:3])} in {folder} would be imported instead of the installed modules"
            fix = "unset PYTHONPATH" if folder in of_path else "export PYTHONSAFEPATH=1"
            return Result(name, False, cause=cause, fix=fix)
    return Result(name, True, "no file hides an installed module")


def check_imports(modules: Sequence[str] = MODULES, *, limit_s: float = 120) -> Result:
    name, modules = "package imports", [one for one in modules if one != "mpi4py" or version_of("horovod")]
    output = run([sys.executable, "-c", IMPORT_EACH, *modules], limit_s=limit_s)
    if output.code == 0:
        return Result(name, True, f"{len(modules)} packages import")
    culprit = (output.stdout.split() or ["the first package"])[-1]
    if output.code is None:
        cause = f"importing {culprit} did not end within {limit_s:g} s"
        return Result(name, False, cause=cause, fix=f"{sys.executable} -X importtime -c 'import {culprit}'")
    ended = output.how_it_ended if output.code < 0 else "failed"
    fix = "unset LD_PRELOAD" if "LD_PRELOAD" in os.environ and "undefined symbol: nccl" in output.stderr else REINSTALL
    return Result(name, False, cause=f"importing {culprit} {ended}: {output.last_error}", fix=fix)


def horovod_facts(*, limit_s: float = 120) -> tuple[dict, Output]:
    """Return the facts of HOROVOD_FACTS (with "version" if Horovod loads), and the child's output."""
    output = run([sys.executable, "-c", HOROVOD_FACTS], limit_s=limit_s)
    facts: dict = {}
    for line in output.stdout.splitlines():
        if line.startswith("facts "):
            facts |= json.loads(line.removeprefix("facts "))
    return facts, output


def check_horovod(facts: dict, output: Output) -> Result:
    name, error = "Horovod imports", output.stderr
    if "version" in facts:
        return Result(name, True, f"Horovod {facts['version']}")
    if output.code is None:
        return Result(name, False, cause="importing Horovod did not end in time", fix=REINSTALL)
    if re.search(r"No module named 'horovod'", error):
        cause = "Horovod is not installed: torchrun starts several ranks without it, mpirun and horovodrun do not"
        return Result(name, True, cause=cause, fix=INSTALL)
    if "built_for" in facts and "horovod_abi" not in facts:  # then horovod.torch imports, but is empty
        return Result(name, False, cause="Horovod was installed without its torch extension", fix=REINSTALL)
    if symbol := re.search(r"undefined symbol: (?!nccl)(\w+)", error):
        cause = f"Horovod was compiled for another torch than the one installed (undefined symbol {symbol[1]})"
    elif library := re.search(r"(lib\S+): cannot open shared object file", error):
        cause = f"{library[1]}, which Horovod was linked with, is not found"
    else:
        cause = f"importing Horovod {output.how_it_ended}: {output.last_error}"
    return Result(name, False, cause=cause, fix=REINSTALL)


def check_built_for(facts: dict) -> Result:
    """Check that Horovod was compiled for this version and C++ ABI of torch: for a similar one it may load and fail."""
    name = "Horovod's torch"
    if facts["built_for"] != facts["torch"]:
        built_for = f"torch {facts['built_for']}" if facts["built_for"] else "an unknown version of torch"
        cause = f"Horovod was built for {built_for}, but torch {facts['torch']} is installed"
        return Result(name, False, cause=cause, fix=REINSTALL)
    ours, theirs = facts.get("horovod_abi"), facts["torch_abi"]
    if ours is not None and ours != theirs:
        cause = f"Horovod was built with _GLIBCXX_USE_CXX11_ABI={ours:d}, but torch {facts['torch']} with {theirs:d}"
        return Result(name, False, cause=cause, fix=install_command("--force", settings="env -u CXXFLAGS"))
    return Result(name, True, f"built for torch {facts['torch']}, C++ ABI {theirs:d}")


def check_controllers(facts: dict) -> Result:
    name = "MPI and Gloo"
    missing = [label for label, key in (("MPI", "mpi"), ("Gloo", "gloo")) if not facts[key]]
    if missing:
        cause = f"Horovod was built without {' and '.join(missing)}"
        return Result(name, False, cause=cause, fix=REINSTALL)
    return Result(name, True, "Horovod was built with both")


def mpi_number(text: str) -> str:
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else "of unknown version"


def check_launchers(facts: dict, *, limit_s: float = 60) -> Result:
    """Check that mpirun and horovodrun are of this installation, and start the MPI that Horovod loads."""
    name, activate = "launchers", f". {shlex.quote(str(Path(sys.prefix, 'bin', 'activate')))}"
    horovodrun, mpirun = shutil.which("horovodrun"), shutil.which("mpirun")
    if horovodrun is None or mpirun is None:
        missing = "mpirun" if horovodrun else "horovodrun"
        return Result(name, False, cause=f"{missing} is not on PATH", fix=activate)
    if Path(horovodrun).parent.resolve() != Path(sys.executable).parent.resolve():
        cause = f"horovodrun on PATH is {horovodrun}, which belongs to another Python than {sys.executable}"
        return Result(name, False, cause=cause, fix=activate)
    output = run([mpirun, "--version"], limit_s=limit_s)
    if output.code != 0:
        cause = f"{mpirun} --version {output.how_it_ended}: {output.last_error}"
        return Result(name, False, cause=cause, fix=REINSTALL)
    started, loaded = mpi_number(output.stdout + output.stderr), mpi_number(facts["mpi_version"] or "")
    if started != loaded:
        cause = (
            f"{mpirun} starts MPI {started}, but Horovod loads {facts['libmpi']}, MPI {loaded}: "
            "every process would believe that it is alone"
        )
        return Result(name, False, cause=cause, fix=activate)
    return Result(name, True, f"MPI {started}, {mpirun}")


def check_compiler(*, limit_s: float = 60) -> Result:
    """Check the C++ compiler of LAMB, VOLO's attention and --run.compile, without which training is slower."""
    name, include = "compiler", sysconfig.get_path("include")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        cause = f"{os.environ.get('CXX', 'g++')} is not found, so LAMB is not compiled and its steps take longer"
        return Result(name, True, cause=cause, fix="unset CXX" if "CXX" in os.environ else "sudo apt-get install g++")
    if not Path(include, "Python.h").exists():
        cause = f"there is no Python.h in {include}, so --run.compile does not work"
        fix = f"sudo apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        return Result(name, True, cause=cause, fix=fix)
    options = ["-std=c++17", "-shared", "-fPIC", "-fopenmp", f"-I{include}"]
    output = run([compiler, *options, "-x", "c++", "-", "-o", "/dev/null"], limit_s=limit_s, stdin=COMPILED)
    if output.code != 0:
        found = re.search(r"error: (.*)", output.stderr)
        error = found[1] if found else output.last_error
        cause = f"{compiler}, which must compile LAMB, {output.how_it_ended}: {error}"
        return Result(name, False, cause=cause, fix="unset CXX" if "CXX" in os.environ else "sudo apt-get install g++")
    return Result(name, True, f"{compiler} compiles")
