"""The set-up script: what it says when something is missing, and that a whole .venv is found, not made again.

Each missing thing is faked through PATH or PYTHON, for a folder of the test's own; nothing is downloaded, and
the repository's .venv is only looked at.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from test_driver import write_driver

from largebatch.doctor import installation
from largebatch.launch.driver import Driver

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted((ROOT / "mpi_scripts").glob("*.sh")), ROOT / "tests/cluster/install.sh", ROOT / ".ci" / "run"]
INSTALLED = ROOT / ".venv" / "largebatch-installed"
OUR_VARIABLES = (
    "PYTHON", "MPI", "CUDA", "OPERATIONS", "HOROVOD_BUILD_CUDA_CC_LIST", "TORCH_INDEX", "CXX", "WHEEL_CACHE", "VENV",
    "MIN_FREE_GB",
)  # fmt: skip


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
    return program(path, f'case "$*" in *{pattern}*) {action} ;; esac\nexec {shlex.quote(sys.executable)} "$@"')


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


def test_no_python(install, tmp_path):
    assert_refused(install(PYTHON="python3.99"), "PYTHON=python3.99 does not run, so install one", "apt-get install")
    tools = tmp_path / "tools"  # just what the script needs before
    tools.mkdir()
    for tool in ("bash", "dirname", "sed", "head", "grep", "mkdir", "flock", "rm"):
        (tools / tool).symlink_to(shutil.which(tool))
    assert_refused(install(PYTHON="", PATH=str(tools)), "no python3 was found on PATH, so install one")


def test_python_in_a_folder_with_a_space(install, tmp_path):
    (tmp_path / "my tools").mkdir()
    old = program(tmp_path / "my tools" / "python3", "echo 3.9")
    assert_refused(install(PYTHON=old), f"{old} is 3.9, so install one")


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


# -- the CUDA of the driver ------------------------------------------------------------------------------------


@pytest.fixture
def plan(install, tmp_path):
    """A function that returns the lines of install.sh --dry-run on a host with this driver, GPU and nvcc."""

    def run(driver="", *, capability="9.0", nvcc="", slurm=False, arguments=(), **variables):
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        answer = f"*compute_cap*) printf '{capability}\\n{capability}\\n' ;; -L) echo 'GPU 0: A (UUID: GPU-1)' ;;"
        program(tools / "nvidia-smi", f"case $1 in {answer} *) exit 6 ;; esac" if driver else "exit 9")
        program(tools / "sinfo", "exit 0" if slurm else "exit 1")
        if nvcc:
            (tools / "bin").mkdir(exist_ok=True)
            program(tools / "bin" / "nvcc", f"echo 'Cuda compilation tools, release {nvcc}, V{nvcc}.77'")
        proc = tmp_path / "proc"
        if driver:
            write_driver(proc, driver, is_open=True)
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        given = {"NVIDIA_PROC": str(proc), "PATH": path, "CUDA_HOME": str(tools)} | variables
        return install("--dry-run", *arguments, **given)

    return run


REGISTRY = "torch: torch==2.13.0 torchvision==0.28.0, from the registry of pip"


def torch_of(build: str, version: str = "2.13.0", vision: str = "0.28.0") -> str:
    index = f"https://download.pytorch.org/whl/{build}"
    return f"torch: torch=={version}+{build} torchvision=={vision}+{build}, from {index}"


@pytest.mark.parametrize(
    "driver, host, torch, dali, horovod",
    [
        ("535.104.05", {"nvcc": "12.2", "capability": "8.0"}, torch_of("cu126"), "120", "nccl operations, "),
        ("575.51.03", {"nvcc": "12.9"}, torch_of("cu129"), "120", "nccl operations, architectures 80,90,100,"),
        ("580.65.06", {"nvcc": "13.0"}, REGISTRY, "130", "nccl operations, architectures 80,90,100,"),
        ("580.65.06", {"nvcc": "13.0", "capability": "12.0"}, REGISTRY, "130", "architectures 80,90,100,120,"),
        ("580.65.06", {"nvcc": "12.8"}, torch_of("cu129"), "120", "nccl operations,"),  # nvcc cannot build for 13
        ("580.65.06", {"CUDA": "13.0", "nvcc": "12.2"}, REGISTRY, "130", "nccl operations, architectures 80,90,100,"),
        ("580.65.06", {"nvcc": "12.8", "capability": "7.0"}, torch_of("cu126"), "120", "architectures 70,80,90,100,"),
        ("580.65.06", {"CUDA": "12.6", "nvcc": "12.6"}, torch_of("cu126"), "120", "nccl operations,"),
        ("580.65.06", {"CUDA": "none"}, torch_of("cpu"), "120", "cpu operations, architectures none,"),
        ("", {}, REGISTRY, "120", "cpu operations, architectures none,"),
        ("", {"OPERATIONS": "nccl", "nvcc": "13.0"}, REGISTRY, "130", "nccl operations, architectures 80,90,100,"),
        (
            "",
            {"OPERATIONS": "nccl", "CUDA": "12.9", "nvcc": "12.9", "HOROVOD_BUILD_CUDA_CC_LIST": "90", "slurm": True},
            torch_of("cu129"),
            "120",
            "nccl operations, architectures 90,",
        ),
    ],
)
def test_torch_dali_and_horovod_fit_the_driver(plan, tmp_path, driver, host, torch, dali, horovod):
    result = plan(driver, **host)
    assert result.returncode == 0, result.stderr
    assert f"install.sh: {torch}\n" in result.stdout and f"nvidia-dali-cuda{dali}==2.4.0\n" in result.stdout
    assert horovod in result.stdout and result.stdout.endswith("nothing was installed, because of --dry-run\n")
    assert f"driver: {driver or 'none'};" in result.stdout
    assert not (tmp_path / ".venv").exists() and not (tmp_path / ".venv.lock").exists()


def test_a_host_with_infiniband_is_told_of_its_own_mpi(plan, tmp_path):
    """The Open MPI of the registry speaks TCP alone."""
    (tmp_path / "class" / "mlx5_0").mkdir(parents=True)
    for folder, told in (tmp_path / "class", True), (tmp_path / "class" / "mlx5_0", False), (tmp_path / "none", False):
        result = plan(INFINIBAND_SYS=str(folder))
        assert result.returncode == 0, result.stderr
        assert ("this host has InfiniBand, which the Open MPI of the registry does not use" in result.stdout) == told


def test_the_training_names_the_cuda_that_is_installed(plan):
    """A driver's CUDA stands in install.sh and in launch/driver.py."""
    for driver in ("525.60.13", "569.99", "570.86", "579.1", "580.65.06"):
        cuda = Driver(driver, 1).cuda
        assert f"driver: {driver}; CUDA: {cuda}\n" in plan(driver).stdout


@pytest.mark.parametrize(
    "driver, host, parts",
    [
        ("470.82.01", {}, ("driver 470.82.01 is too old", "CUDA=none")),
        ("", {"CUDA": "11.8"}, ("CUDA=11.8 is unknown", "12.6, 12.9, 13.0 or none")),
        ("", {"CUDA": "none", "OPERATIONS": "nccl"}, ("CUDA=none and OPERATIONS=nccl", "leave one of them out")),
        ("", {"CUDA": "12.9", "OPERATIONS": "nccl", "nvcc": "13.0"}, ("no nvcc of torch's CUDA 12.9 (", " has 13.0)")),
        ("", {"slurm": True}, ("may be a login node", "OPERATIONS=nccl CUDA=12.6", "OPERATIONS=cpu")),
        ("", {"arguments": ["--horovod-source"]}, ("--horovod-source needs a folder",)),
        ("", {"arguments": ["--horovod-source", "/nowhere"]}, ("--horovod-source is /nowhere: expected a folder",)),
        ("", {"arguments": ["--horovod-source", "/proc"]}, ("expected horovod-0.28.1.tar.gz there, or the unpacked",)),
    ],
)
def test_choices_that_do_not_fit(plan, driver, host, parts):
    assert_refused(plan(driver, **host), *parts)


@pytest.mark.parametrize(
    "host, parts",
    [
        ({"OPERATIONS": "nccl"}, ("--no-horovod and OPERATIONS=nccl", "torch brings its own NCCL", "CUDA=... chooses")),
        ({"MPI": "system"}, ("--no-horovod and MPI=system", "only Horovod uses MPI", "leave one of them out")),
        ({"arguments": ["--horovod-source", "/tmp"]}, ("--no-horovod and --horovod-source", "leave one of them out")),
        ({"slurm": True}, ("may be a login node", "with CUDA=12.6 (or 12.9, 13.0", "or with CUDA=none")),
        ({"CUDA": "11.8"}, ("CUDA=11.8 is unknown",)),
    ],
)
def test_choices_that_do_not_fit_without_horovod(plan, host, parts):
    arguments = ["--no-horovod", *host.get("arguments", ())]
    assert_refused(plan("", **host | {"arguments": arguments}), *parts)


@pytest.mark.parametrize(
    "driver, host, torch, dali",
    [
        ("535.104.05", {}, torch_of("cu126"), "120"),
        ("580.65.06", {"nvcc": "12.8"}, REGISTRY, "130"),  # no nvcc is needed
        ("580.65.06", {"CUDA": "none"}, torch_of("cpu"), "120"),
        ("", {"CUDA": "12.9", "slurm": True, "OPERATIONS": "auto"}, torch_of("cu129"), "120"),
    ],
)
def test_torch_and_dali_fit_the_driver_without_horovod(plan, tmp_path, driver, host, torch, dali):
    """Neither a compiler nor Python's headers are there."""
    python = python_where(tmp_path / "python", pattern="sysconfig", action="echo /no/such/include; exit 0")
    result = plan(driver, arguments=["--no-horovod"], CXX="no-such-compiler", PYTHON=python, **host)
    assert result.returncode == 0, result.stderr
    assert f"install.sh: {torch}\n" in result.stdout and f"nvidia-dali-cuda{dali}==2.4.0\n" in result.stdout
    assert "Horovod: none, because of --no-horovod\n" in result.stdout and "operations" not in result.stdout


def test_the_nvcc_of_cuda_13_is_taken_from_the_registry_if_the_host_has_another(plan):
    for nvcc, said in ("12.2", "that of the registry (CUDA 13.0)"), ("13.2", "bin/nvcc (CUDA 13.2)"):
        assert f"{said}\n" in plan("580.65.06", CUDA="13.0", nvcc=nvcc).stdout


def test_a_driver_older_than_the_cuda_that_was_chosen(plan):
    """The hosts that train may have another driver, so it is no error."""
    result = plan("535.104.05", CUDA="13.0")
    assert result.returncode == 0 and "CUDA=13.0 needs driver 580 or newer on the hosts that train" in result.stdout


# -- Horovod's source ------------------------------------------------------------------------------------------


def functions(script: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script after the functions of install.sh, whose last line starts it."""
    path = ROOT / "mpi_scripts" / "install.sh"
    text = path.read_text().replace("${BASH_SOURCE[0]}", str(path))
    assert text.endswith('\nmain "$@"\n')
    command = text.removesuffix('main "$@"\n') + "HOROVOD_SOURCE='' DRY_RUN=no\n" + script
    return subprocess.run(["bash", "-c", command], env=os.environ | variables, capture_output=True, text=True)


@pytest.fixture
def horovod_source(tmp_path) -> Path:
    """The line of Horovod's source that patch_cuda changes, in its folder."""
    root = tmp_path / "given" / "horovod-0.28.1"
    for name, text in {
        "setup.py": "",
        "horovod/__init__.py": "__version__ = '0.28.1'\n",
        "third_party/gloo/CMakeLists.txt": "",
        "horovod/torch/cuda_util.cc": '  cudalib = dlopen("libcuda.so", RTLD_LAZY);\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("operations", ["cpu", "nccl"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_source_that_was_given(horovod_source, tmp_path, packed, operations):
    """It is found unpacked, in its folder, or packed; only for GPUs it is changed. The user's own stays as it is."""
    given = horovod_source.parent
    if packed:
        subprocess.run(["tar", "-czf", "horovod-0.28.1.tar.gz", "horovod-0.28.1"], cwd=given, check=True)
        shutil.move(horovod_source, tmp_path / "elsewhere")
    (tmp_path / ".venv").mkdir()
    script = f'HOROVOD_SOURCE="{given}" OPERATIONS={operations} MPI=system; check_source; choose_work; unpack_source'
    result = functions(script, VENV=str(tmp_path / ".venv"))
    assert result.returncode == 0, result.stderr
    code = (tmp_path / ".venv/build/horovod-0.28.1/horovod/torch/cuda_util.cc").read_text()
    assert ('dlopen("libcuda.so.1",' in code) == (operations == "nccl")
    assert packed or 'dlopen("libcuda.so",' in (horovod_source / "horovod/torch/cuda_util.cc").read_text()


@pytest.mark.parametrize("name", ["plain", "my projects", "it's", "é", "a#b%20(1)&;c"])
def test_horovod_is_built_where_cmake_sees_no_space(tmp_path, name):
    """FindMPI asks the mpicxx that it finds beside mpiexec, and splits the answer at spaces."""
    venv = tmp_path / name / ".venv"
    (venv / "bin").mkdir(parents=True)
    program(venv / "bin" / "opal_wrapper", 'echo "-I$OPAL_PREFIX/include"')
    script = 'MPI=wheel; trap tidy_build EXIT; choose_work; cd "$WORK"; pwd; mpi/bin/mpicxx; ls -d mpi/bin/* venv/bin'
    result = functions(script, VENV=str(venv), TMPDIR=str(tmp_path / "with a space"))
    work, include, *tools = result.stdout.split("\n")
    assert include == f"-I{work}/venv/include" and re.fullmatch(r"[\w./+-]+", work, re.ASCII), result
    assert tools == ["mpi/bin/mpicc", "mpi/bin/mpicxx", "mpi/bin/mpiexec", "venv/bin", ""]
    assert not Path(work).exists() and (venv / "bin" / "opal_wrapper").exists()


@pytest.mark.evidence
def test_the_whole_set_up_in_a_folder_with_a_space(tmp_path):
    """With spaces in all its folders, and an empty cache, so that Horovod is built; two ranks then train."""
    tree = tmp_path / "it's my projects é"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "build"))
    for name in ("a home", "a tmp"):
        (tmp_path / name).mkdir()
    given = {"HOME": tmp_path / "a home", "TMPDIR": tmp_path / "a tmp", "WHEEL_CACHE": tmp_path / "a cache"}
    environment = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES} | given
    options = "--model vit_nano32 --run.max_steps 1 --data.global_batch_size 8 --data.micro_batch_size 4".split()
    run = {"cwd": tree, "env": environment, "check": True, "timeout": 3600}
    subprocess.run(["mpi_scripts/install.sh"], **run)
    assert list((tmp_path / "a cache").glob("*/*.whl"))
    subprocess.run(["mpi_scripts/train_local.sh", *options, "--run.folder", "a run"], **run)
    assert (tree / "a run" / "steps.csv").exists()


@pytest.mark.parametrize("name", ['a "b"', "$HOME", "a`b`", "a:b", "a\\b", "a\nb"])
def test_folders_in_which_no_environment_works(install, tmp_path, name):
    result = install(VENV=str(tmp_path / name / ".venv"))
    assert result.returncode == 1 and "rename the folder, or give another VENV=" in result.stderr, result.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "log, cause",
    [
        ("-- ok\nCMake Error in a.txt:\n\n  no such path\n\n    /my\n", "CMake Error in a.txt: no such path"),
        ("FAILED: a.o\n/x/common.h:343: error: 'logic_error' is not in std\n", "/x/common.h:343: error: 'logic_error'"),
        ("/x/a.cc:1:10: fatal error: mpi.h: No such file\ncompilation terminated.\n", "fatal error: mpi.h: No such"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_70'\n", "Unsupported gpu architecture 'compute_70'"),
        ("all is well\n", "its output names no error"),
    ],
)
def test_the_first_error_of_a_build_is_printed(tmp_path, log, cause):
    (tmp_path / "install.log").write_text(f"error: of a step before\n{log}  error: subprocess-exited-with-error\n")
    result = functions("cause_of 2", VENV=str(tmp_path))
    assert cause in result.stdout and "step before" not in result.stdout and "subprocess" not in result.stdout
    assert result.stdout.count("\n") == 1 and not result.stderr


def test_a_source_of_another_version(horovod_source):
    (horovod_source / "horovod/__init__.py").write_text("__version__ = '0.28.0'\n")
    result = functions(f'HOROVOD_SOURCE="{horovod_source}"; check_source')
    assert_refused(result, "expected horovod-0.28.1.tar.gz there, or the unpacked sdist of this version")


def test_a_source_that_patches_do_not_fit(horovod_source, tmp_path):
    (horovod_source / "horovod/torch/cuda_util.cc").write_text("")
    (tmp_path / ".venv").mkdir()
    script = f'HOROVOD_SOURCE="{horovod_source}" OPERATIONS=nccl MPI=system; choose_work; unpack_source'
    result = functions(script, VENV=str(tmp_path / ".venv"))
    assert_refused(result, "cannot patch Horovod 0.28.1", "is not in its horovod/torch/cuda_util.cc")


# of Horovod: the files whose includes GCC 13 and 14 miss (all 63 were tried by hand), and one that includes torch
NEWER_COMPILERS_MISS = ("common", "operations", "response_cache", "group_table", "message")


@pytest.fixture(scope="module")
def debian13(tmp_path_factory) -> Path:
    """The compilers of Debian 13 in a folder, with Horovod's source as install.sh changes it, and what it includes."""
    if os.getuid() or not shutil.which("mmdebstrap"):
        pytest.skip("needs root and mmdebstrap: sudo tests/cluster/install.sh")
    root = tmp_path_factory.mktemp("debian13")
    extract = ["mmdebstrap", "--variant=extract", "--include=g++-13,g++-14", "trixie", root]
    subprocess.run(extract, check=True, capture_output=True, timeout=300)
    (root / "lib64").symlink_to("usr/lib64")
    for name, folder in {
        "mpi": Path(sys.prefix, "include"),
        "torch": Path(torch.__file__).with_name("include"),
        "python": Path(sysconfig.get_path("include")),
        "native": ROOT / "largebatch" / "native",
    }.items():
        shutil.copytree(folder, root / "src" / name)
    download = "pip download -q --no-binary horovod --no-deps --no-build-isolation horovod==$HOROVOD_VERSION"
    patch = f"MPI=wheel OPERATIONS=cpu; cd {root}/src; {download}; tar -xf horovod-*.gz; cd horovod-*/; patch_horovod"
    done = functions(patch)
    assert done.returncode == 0, done.stderr
    (source,) = (root / "src").glob("horovod-*/")
    return source.rename(root / "src" / "horovod")


@pytest.mark.evidence
@pytest.mark.parametrize("compiler", ["g++-13", "g++-14"])  # of Ubuntu 24.04, of Debian 13
def test_newer_compilers_take_horovod_and_our_own_sources(debian13, compiler):
    root = debian13.parents[1]
    includes = [debian13, *debian13.glob("third_party/boost/*/include"), *debian13.glob("third_party/*/include")]
    includes += [debian13 / "third_party" / name for name in ("eigen", "gloo")]
    includes += [root / "src" / name for name in ("mpi", "python", "torch", "torch/torch/csrc/api/include")]
    options = [f"-I/{folder.relative_to(root)}" for folder in includes]
    options += ["-std=c++17", "-fPIC", "-DHAVE_MPI=1", "-DHAVE_GLOO=1", "-DTORCH_VERSION=2013000000"]
    files = [debian13 / "horovod" / "torch" / "mpi_ops_v2.cc"]
    files += [debian13 / "horovod" / "common" / f"{name}.cc" for name in NEWER_COMPILERS_MISS]
    files += (root / "src" / "native").glob("*.cpp")
    assert len(files) == 8
    for file in files:
        command = ["chroot", root, compiler, "-fsyntax-only", "-w", *options, f"/{file.relative_to(root)}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize(
    "has, wanted, found", [("0.28.1", "yes", 1), ("0.28.1", "no", 1), ("none", "no", 1), ("none", "yes", 0)]
)
def test_a_venv_with_or_without_horovod_is_found(tmp_path, has, wanted, found):
    """A venv with Horovod will do for both; one without it gets Horovod, if it is asked for."""
    (tmp_path / "bin").mkdir()
    version = f'case "$*" in *torch) echo 2.13.0 ;; *) [ {has} != none ] && echo {has} ;; esac'
    program(tmp_path / "bin" / "python", version)
    marker = "{ echo fingerprint=$(fingerprint); echo torch=2.13.0; echo cuda=none; echo horovod=" + has
    script = f'MPI=wheel HOROVOD={wanted}; {marker}; }} >"$MARKER"; if whole; then report found; fi'
    result = functions(script, VENV=str(tmp_path))
    assert not result.stderr and ("install.sh: found " in result.stdout) == found
    assert ("no Horovod: several ranks start under torchrun\n" in result.stdout) == (found and has == "none")


@pytest.mark.parametrize("code, waits", [(0, False), (1, True), (65, False), (71, False)])
def test_a_file_system_without_locks_is_no_other_set_up(tmp_path, code, waits):
    """flock -n ends with 1 if another process holds the lock, and with 65 or 71 on Lustre or NFS without locks."""
    program(tmp_path / "flock", f'[ "$1" = -n ] || {{ echo waited; exit 0; }}; exit {code}')
    script = "lock; echo went on"
    result = functions(script, VENV=str(tmp_path / "venv"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 0 and result.stdout.endswith("went on\n"), result.stderr
    assert ("another install.sh is working" in result.stdout, "waited" in result.stdout) == (waits, waits)


def test_a_horovod_that_is_out_of_date_is_not_left_behind(tmp_path):
    (tmp_path / "largebatch-installed").write_text("fingerprint=old\nhorovod=0.28.1\n")
    result = functions("FORCE=no CUDA='' HOROVOD=no; make_venv python3", VENV=str(tmp_path))
    assert_refused(result, "has a Horovod, but is not up to date: run install.sh without --no-horovod, or with --force")


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
    mpirun, size, _ = result.stdout.rsplit(maxsplit=2)
    assert size == "1"
    if "mpi_choice=wheel" in INSTALLED.read_text():
        assert Path(mpirun).parent == ROOT / ".venv" / "bin"


@pytest.mark.parametrize("launcher, program", [("link", "real"), ("real", "link"), ("link", "link")])
@pytest.mark.parametrize("name", ["mpirun", "horovodrun"])
def test_a_venv_that_has_two_names(tmp_path, name, launcher, program):
    """A folder in /home that is a link into a larger file system."""
    if not INSTALLED.exists() or "mpi_choice=wheel" not in INSTALLED.read_text():
        pytest.skip("the repository has no .venv with the MPI of the registry")
    folders = {"real": ROOT / ".venv" / "bin", "link": tmp_path / "linked" / "bin"}
    folders["link"].parent.symlink_to(ROOT / ".venv")
    code = "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2"
    command = [folders[launcher] / name, "-np", "2", folders[program] / "python", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_timm_may_be_imported_first(tmp_path):
    """Also where the registry's torchvision stands beside another build of torch: its operators are then declared."""
    functions = r"sed -n '/^\(mpi_environment\|write_startup_module\)() {/,/^}/p' mpi_scripts/install.sh"
    script = f'eval "$({functions})"; ROOT=$PWD SITE="{tmp_path}" MPI=wheel KEEPALIVES=(); write_startup_module'
    subprocess.run(["bash", "-euc", script], cwd=ROOT, check=True)
    assert (tmp_path / "_largebatch_environment.pth").read_text() == "import _largebatch_environment\n"
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules.pop('_largebatch_environment', None)\n"
        "its_own = [one for one in sys.meta_path if getattr(one, '__name__', '') == 'BeforeTorchvision']\n"
        "sys.meta_path[:] = [one for one in sys.meta_path if one not in its_own]\n"
        "import _largebatch_environment as started, importlib.util\n"
        "assert importlib.util.find_spec('torchvision') and 'torch' not in sys.modules\n"
        "import timm; assert 'zoo' not in sys.modules and started.__file__.startswith(sys.path[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_a_folder_for_temporary_files_that_is_not_there(tmp_path, launcher):
    if not INSTALLED.exists() or "mpi_choice=wheel" not in INSTALLED.read_text():
        pytest.skip("the repository has no .venv with the MPI of the registry")
    gone = {"TMPDIR": str(tmp_path / "gone")}
    command = [ROOT / ".venv" / "bin" / launcher, "-np", "2", "true"]
    done = subprocess.run(command, env=os.environ | gone, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "ORTE_ERROR_LOG" not in done.stderr
    assert f"mpirun: TMPDIR is {tmp_path}/gone, and there is no such folder that can be written to" in done.stderr


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


def test_what_horovodrun_gives_to_ssh_and_to_mpi():
    """A lost host ends the job in time, and no process sleeps at its end."""
    if not INSTALLED.exists():
        pytest.skip("the repository has no .venv of mpi_scripts/install.sh")
    program = "from horovod.runner import mpi_run; from horovod.runner.util.remote import get_ssh_command\n"
    program += "print(*mpi_run._OMPI_FLAGS, get_ssh_command('true', 'b'))"
    command = [ROOT / ".venv" / "bin" / "python", "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "-mca btl ^openib,ofi ssh -o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o Passw" in said, said


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(script):
    """bash accepts it, it says what it is for, and shellcheck has nothing to say."""
    subprocess.run(["bash", "-n", script], check=True)
    head = script.read_text().split("\n\n")[0]
    assert all(f"# {label}:" in head for label in ("What", "Hardware", "Time", "Prints"))
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: it comes with the test extra")
    result = subprocess.run(["shellcheck", "-x", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout
