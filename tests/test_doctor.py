"""The doctor against installations that are broken on purpose: it must name the cause and one command.

What is broken is put in front of the real thing, as it happens to users: a copy of Horovod whose compiled part
was made for something else, a package that shadows another through PYTHONPATH, another program called mpirun on
PATH, a limit of the shell, a variable that some other job left behind. The launches at the end are real.
"""

import importlib.metadata
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from test_driver import write_driver

from largebatch.doctor import __main__ as command_line
from largebatch.doctor import gpu, installation, launches, machine
from largebatch.doctor.installation import Requirement
from largebatch.doctor.result import Result, run
from largebatch.launch import driver

ROOT = Path(__file__).parents[1]

GOOD = {
    "version": "0.28.1",
    "built_for": "2.13.0",
    "horovod_abi": True,
    "torch": "2.13.0",
    "torch_abi": True,
    "cuda": None,
    "gpus": 0,
    "mpi": True,
    "gloo": True,
    "nccl": False,
    "libmpi": "/somewhere/libmpi.so.40",
    "mpi_version": "Open MPI v4.1.8, package: x",
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A function that puts a shell script in front of PATH under a name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def add(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
        return path

    return add


@pytest.fixture
def horovod(tmp_path, monkeypatch) -> Path:
    """A copy of the installed Horovod, in front of it through PYTHONPATH, to be broken."""
    installed = Path(importlib.metadata.distribution("horovod").locate_file("horovod"))
    copy = tmp_path / "in front" / "horovod"
    shutil.copytree(installed, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(copy.parent))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(installed.parents[2]))  # of the MPI that it finds relative to itself
    return copy


def rewrite(file: Path, text: str) -> None:
    """In place of a link to the installed file."""
    file.unlink()
    file.write_text(text)


def compile_extension(horovod: Path, source: str, *options: str) -> None:
    """Put a library of this C++ source in place of Horovod's compiled part."""
    library = horovod / "torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}"
    library.unlink()
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library), *options]
    subprocess.run(command, input=source, text=True, check=True)


def assert_failed(result: Result, *, cause: str, fix: str) -> None:
    assert not result.ok
    assert cause in result.cause and "\n" not in result.cause, result
    assert fix in result.fix and "\n" not in result.fix, result


def assert_noted(result: Result, *, cause: str, fix: str) -> None:
    """Training works, with something to improve."""
    assert result.ok and cause in result.cause and fix in result.fix, result
    assert str(result).startswith("note  ")


# -- versions and imports --------------------------------------------------------------------------------------


def fake_distributions(monkeypatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["aa", 'bb<3,>=2.0; extra == "train"', 'cc==3; extra == "test"']
    )


def test_it_runs_where_no_package_is_installed():
    """-S leaves out site-packages."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); import largebatch.doctor.__main__"
    subprocess.run([sys.executable, "-S", "-I", "-c", program, str(ROOT)], check=True)


def test_versions_that_fit(monkeypatch):
    fake_distributions(monkeypatch, {"aa": "1.0+cpu", "bb": "2.0+cpu"})
    assert installation.check_versions() == Result(
        "package versions", True, "2 packages are in the ranges that the metadata of largebatch allow"
    )


def test_all_missing_packages_are_named_with_a_command_that_installs_them(monkeypatch):
    fake_distributions(monkeypatch, {})
    fix = f"{sys.executable} -m pip install aa 'bb<3,>=2.0'"
    assert_failed(installation.check_versions(), cause="aa, bb<3,>=2.0 are not installed", fix=fix)


@pytest.mark.parametrize("version", ["1.9.9", "3.0", "3", "10.1"])
def test_version_differs(monkeypatch, version):
    fake_distributions(monkeypatch, {"aa": "1.0", "bb": version})
    cause = f"bb<3,>=2.0 is needed, but {version} is installed"
    assert_failed(installation.check_versions(), cause=cause, fix="pip install 'bb<3,>=2.0'")


def test_ranges_are_read_as_the_standard_says():
    versions = "0.9 1 1.0 1.0.1 1.9+cu126 1.10 2 2.0.0 2.0.1 3.0.0 13.1".split()
    for versions_wanted in ("", ">=1", ">=1.10,<2", "==2.0", "<=2,>1.0", "<3,>=2"):
        allowed = [version for version in versions if Requirement("x", versions_wanted).allows(version)]
        assert allowed == [*SpecifierSet(versions_wanted).filter(versions)], versions_wanted


def test_package_missing(monkeypatch):
    fake_distributions(monkeypatch, {"aa": "1.0"})
    assert_failed(installation.check_versions(), cause="bb<3,>=2.0 is not installed", fix="-m pip install 'bb<3,>=2.0'")


@pytest.mark.parametrize("installed, wrong", [("120", False), ("130", False), ("", True)])
def test_either_dali_will_do(monkeypatch, installed, wrong):
    """install.sh chooses that of torch's CUDA; the version is the same."""
    fake_distributions(monkeypatch, {f"nvidia-dali-cuda{installed}": "2.4.0"})
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["nvidia-dali-cuda120==2.4.0"])
    assert installation.check_versions().ok is not wrong


def test_project_not_installed(monkeypatch):
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert_failed(installation.check_versions(), cause="not installed for", fix="mpi_scripts/install.sh --force")


def test_import_fails(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("raise OSError('libodd.so: file too short')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = installation.check_imports(("json", "broken_part", "math"))
    assert_failed(
        result, cause="importing broken_part failed: OSError: libodd.so: file too short", fix="--force"
    )
    assert installation.check_imports(("json", "math")).ok


@pytest.mark.parametrize("entry", ["packaging.py", "yaml/__init__.py", "random.py"])
@pytest.mark.parametrize("through", ["PYTHONPATH", "working folder"])
def test_package_is_shadowed(tmp_path, monkeypatch, through, entry):
    """By a file of somebody's own; of installed packages and of Python's library."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / entry).parent.mkdir(exist_ok=True)
    (tmp_path / entry).write_text("")
    name, fix = entry.partition("/")[0].removesuffix(".py"), ("PYTHONSAFEPATH", "export PYTHONSAFEPATH=1")
    if through == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        fix = ("PYTHONPATH", "unset PYTHONPATH")
    else:
        monkeypatch.chdir(tmp_path)
    result = installation.check_shadowing()
    assert_failed(result, cause=f"{name} in {tmp_path} would be imported instead of the installed modules", fix=fix[1])
    monkeypatch.setenv(fix[0], "1" if fix[0] == "PYTHONSAFEPATH" else "")
    assert installation.check_shadowing().ok


def test_nothing_of_ours_shadows(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    assert installation.check_shadowing().ok


def test_import_kills_the_process(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = installation.check_imports(("json", "deadly"))
    assert_failed(result, cause="importing deadly was killed by SIGSEGV", fix="install.sh --force")


def test_import_hangs(tmp_path, monkeypatch):
    (tmp_path / "stuck.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = installation.check_imports(("stuck",), limit_s=2)
    assert_failed(result, cause="importing stuck did not end within 2 s", fix="-X importtime -c 'import stuck'")


# -- Horovod ---------------------------------------------------------------------------------------------------

ABI_OF = """
#include <string>
namespace horovod { namespace common {
enum StatusType { OK };
struct Status { Status(StatusType, std::string); };
Status::Status(StatusType, std::string) {}
} }
"""


def horovod_result() -> Result:
    return installation.check_horovod(*installation.horovod_facts())


def test_horovod_as_it_is(horovod):
    """The copy that the next tests break is whole."""
    facts, output = installation.horovod_facts()
    assert installation.check_horovod(facts, output).ok, output.stderr
    assert installation.check_built_for(facts).ok and installation.check_controllers(facts).ok
    assert facts["horovod_abi"] is facts["torch_abi"] is True


def test_horovod_not_installed(horovod):
    """As for a Python of elsewhere that has torch: the name leads nowhere."""
    rewrite(horovod / "__init__.py", "raise ModuleNotFoundError(\"No module named 'horovod'\")")
    found = horovod_result()
    assert_noted(found, cause="torchrun starts several ranks without it, mpirun and horovodrun do", fix="install.sh")


def test_horovod_without_its_compiled_part(horovod):
    next((horovod / "torch").glob("mpi_lib_v2*.so")).unlink()
    assert_failed(horovod_result(), cause="without its torch extension", fix="install.sh --force")


@pytest.mark.needs_compiler
def test_a_symbol_is_missing(horovod):
    compile_extension(horovod, "namespace c10 { void gone(); } void use() { c10::gone(); }")
    cause = "compiled for another torch than the one installed (undefined symbol _ZN3c104goneEv)"
    assert_failed(horovod_result(), cause=cause, fix="install.sh --force")


@pytest.mark.needs_compiler
def test_a_library_is_missing(horovod, tmp_path):
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", f"{tmp_path}/libgoing.so"], check=True)
    compile_extension(horovod, "", f"-L{tmp_path}", "-Wl,--no-as-needed", "-lgoing")
    assert_failed(horovod_result(), cause="libgoing.so, which Horovod was linked with, is not found", fix="--force")


@pytest.mark.needs_compiler
def test_the_compiled_part_crashes(horovod):
    compile_extension(horovod, "#include <csignal>\nstatic int crash = raise(SIGSEGV);")
    assert_failed(horovod_result(), cause="importing Horovod was killed by SIGSEGV", fix="install.sh --force")


def test_another_error(horovod):
    rewrite(horovod / "torch" / "mpi_ops.py", "raise RuntimeError('something else')")
    assert_failed(horovod_result(), cause="RuntimeError: something else", fix="install.sh --force")


def test_horovod_does_not_answer(horovod):
    rewrite(horovod / "torch" / "mpi_ops.py", "import signal; signal.pause()")
    facts, output = installation.horovod_facts(limit_s=3)
    assert_failed(installation.check_horovod(facts, output), cause="did not end in time", fix="install.sh --force")


@pytest.mark.needs_compiler
def test_built_for_another_torch(horovod):
    """Known before it is loaded, which may fail for just that reason."""
    rewrite(horovod / "metadata.json", '{"pytorch": "1.0.0"}')
    compile_extension(horovod, "namespace c10 { void gone(); } void use() { c10::gone(); }")
    facts, _ = installation.horovod_facts()
    result = installation.check_built_for(facts)
    assert_failed(result, cause="built for torch 1.0.0, but torch 2.", fix="install.sh --force")
    (horovod / "metadata.json").unlink()
    result = installation.check_built_for(installation.horovod_facts()[0])
    assert_failed(result, cause="built for an unknown version of torch, but", fix="install.sh --force")


@pytest.mark.needs_compiler
def test_built_with_another_abi(horovod):
    compile_extension(horovod, ABI_OF, "-D_GLIBCXX_USE_CXX11_ABI=0")
    result = installation.check_built_for(installation.horovod_facts()[0])
    assert_failed(result, cause="Horovod was built with _GLIBCXX_USE_CXX11_ABI=0, but torch 2.", fix="env -u CXXFLAGS")
    compile_extension(horovod, ABI_OF)
    assert installation.check_built_for(installation.horovod_facts()[0]).ok


@pytest.mark.parametrize("flag, label", [("gloo_built", "Gloo"), ("mpi_built", "MPI")])
def test_a_controller_is_missing(horovod, flag, label):
    torch_part = horovod / "torch" / "__init__.py"
    rewrite(torch_part, f"{torch_part.read_text()}\n{flag} = lambda: False\n")
    result = installation.check_controllers(installation.horovod_facts()[0])
    assert_failed(result, cause=f"Horovod was built without {label}", fix="install.sh --force")


# -- launchers and compiler ------------------------------------------------------------------------------------


@pytest.fixture
def our_bin(tmp_path, monkeypatch):
    """PATH with nothing on it but horovodrun beside an interpreter that passes for ours."""
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / "horovodrun").write_text("#!/bin/sh\n")
    (folder / "horovodrun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin")
    return folder


def test_no_mpirun(our_bin, monkeypatch):
    monkeypatch.setenv("PATH", str(our_bin))
    assert_failed(installation.check_launchers(GOOD), cause="mpirun is not on PATH", fix="/bin/activate")


def test_no_horovodrun(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_failed(installation.check_launchers(GOOD), cause="horovodrun is not on PATH", fix="/bin/activate")


def test_horovodrun_of_another_python(our_bin, programs):
    programs("horovodrun", "exit 0")
    programs("mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    assert_failed(installation.check_launchers(GOOD), cause="belongs to another Python", fix="/bin/activate")


@pytest.mark.parametrize(
    "script, cause",
    [
        (
            "echo 'mpirun (Open MPI) 3.0.0'",
            "starts MPI 3.0.0, but Horovod loads /somewhere/libmpi.so.40, MPI 4.1.8",
        ),
        (
            "echo 'cannot open libopen-rte.so' >&2; exit 127",
            "ended with exit code 127: cannot open libopen-rte.so",
        ),
    ],
)
def test_mpirun_is_not_horovods(our_bin, script, cause):
    (our_bin / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
    (our_bin / "mpirun").chmod(0o755)
    assert_failed(installation.check_launchers(GOOD), cause=cause, fix="i")


def test_mpirun_is_horovods(our_bin):
    (our_bin / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n")
    (our_bin / "mpirun").chmod(0o755)
    assert installation.check_launchers(GOOD).ok


@pytest.mark.needs_compiler
def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_noted(installation.check_compiler(), cause="no-such-compiler is not found", fix="unset CXX")
    monkeypatch.delenv("CXX")
    assert installation.check_compiler() == Result("compiler", True, f"{shutil.which('g++')} compiles")
    monkeypatch.setenv("PATH", "/nowhere")
    assert_noted(installation.check_compiler(), cause="g++ is not found", fix="apt-get install g++")


@pytest.mark.needs_compiler
def test_no_python_header(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert_noted(installation.check_compiler(), cause=f"no Python.h in {tmp_path}", fix="apt-get install python3.")


def test_compiler_does_not_compile(programs):
    programs("g++", "echo 'x.cpp:2:10: fatal error: omp.h: No such file or directory' >&2; exit 1")
    result = installation.check_compiler()
    assert_failed(result, cause="exit code 1: omp.h: No such file or directory", fix="apt-get install g++")


# -- machine ---------------------------------------------------------------------------------------------------


def under_limit(limit: str, check: str) -> str:
    """What a check prints in a process that has been given less of something. limit: an option of prlimit."""
    program = f"from largebatch.doctor import machine; print(machine.{check}())"
    command = ["prlimit", limit, sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_few_open_files():
    printed = under_limit("--nofile=64", "check_open_files")
    assert "FAIL" in printed and "may have 64 files open, but 256 are needed" in printed
    assert "fix:   sudo prlimit --pid $$ --nofile=65536" in printed
    printed = under_limit("--nofile=64:4096", "check_open_files")
    assert "fix:   ulimit -n $(ulimit -H -n)" in printed
    assert machine.check_open_files().ok


def test_little_address_space():
    printed = under_limit("--as=1073741824", "check_memory")
    assert "FAIL" in printed and "is limited to 1024 MiB" in printed and "fix:   ulimit -v unlimited" in printed


def test_little_memory(monkeypatch):
    assert machine.check_memory().ok
    monkeypatch.setattr(machine, "NEEDED_MEMORY_BYTES", 2**60)
    cause = "GiB are available, but two ranks of the quick start need"
    assert_failed(machine.check_memory(), cause=cause, fix="ps aux")


def test_little_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert machine.check_disk().ok
    monkeypatch.setattr(machine, "NEEDED_DISK_BYTES", 2**60)
    cause = f"GiB are free in {tmp_path}, but checkpoints need"
    assert_failed(machine.check_disk(), cause=cause, fix=f"df -h {tmp_path}")


def test_shared_memory(tmp_path, monkeypatch):
    assert machine.check_shared_memory().ok
    result = machine.check_shared_memory(f"{tmp_path}/shm")
    assert_failed(result, cause="is not a folder where files can be created", fix=f"tmpfs {tmp_path}/shm")
    monkeypatch.setattr(machine, "NEEDED_SHM_BYTES", 2**60)
    assert_failed(machine.check_shared_memory(), cause="(docker: --shm-size=1g)", fix="remount,size=1g /dev/shm")


@pytest.mark.parametrize(
    "host, cause",
    [("no-such-host.invalid", "does not resolve"), ("192.0.2.7", "resolves to 192.0.2.7, an address of another")],
)
def test_host_name_does_not_lead_here(monkeypatch, host, cause):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert_failed(machine.check_hostname(), cause=cause, fix=f"echo '127.0.0.1 {host}' | sudo tee -a /etc/hosts")


def test_host_name_leads_here(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert machine.check_hostname().ok


@pytest.mark.parametrize("home, where", [(None, "HOME is not set"), ("/no/such", "HOME is /no/such, where it cannot")])
def test_a_user_id_without_a_name_and_a_home(monkeypatch, tmp_path, home, where):
    if home:
        monkeypatch.setenv("HOME", home)
    else:
        monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    cause = f"the user id 54321 has no name, and {where}"
    assert_failed(machine.check_home(), cause=cause, fix="export HOME=$(mktemp -d)")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.check_home().ok


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", "WORLD_SIZE", "SLURM_NTASKS"])
def test_a_launcher_variable_was_left_over(monkeypatch, name):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert machine.check_launcher_variables().ok
    monkeypatch.setenv(name, "4")
    assert_failed(machine.check_launcher_variables(), cause=f"{name}=4 is set", fix=f"unset {name}")


def test_an_allocation_is_no_leftover(monkeypatch):
    """In salloc and sbatch the number of tasks is there for mpirun to read."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert machine.check_launcher_variables().ok


def test_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine.check_threads().cause == ""
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    assert_failed(machine.check_threads(), cause="OMP_NUM_THREADS is 'all'", fix="unset OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "5000")
    assert_noted(machine.check_threads(), cause="OMP_NUM_THREADS is 5000 for each rank", fix="unset OMP_NUM_THREADS")


def test_gpu(programs, monkeypatch):
    programs("nvidia-smi", "echo 'GPU 0: some (UUID: GPU-1)'; echo 'GPU 1: some (UUID: GPU-2)'")
    assert_failed(machine.check_gpu(GOOD, "auto"), cause="built without CUDA", fix="install.sh --force")
    blind = GOOD | {"cuda": "13.0"}
    assert_failed(machine.check_gpu(blind, "auto"), cause="torch (CUDA 13.0) sees none", fix="nvidia-smi")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert_failed(machine.check_gpu(blind, "auto"), cause="CUDA_VISIBLE_DEVICES hides", fix="unset CUDA_VISIBLE")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    seeing = blind | {"gpus": 2}
    assert_failed(machine.check_gpu(seeing, "auto"), cause="built without NCCL", fix="OPERATIONS=nccl")
    assert machine.check_gpu(seeing | {"nccl": True}, "auto").ok
    assert machine.check_gpu(GOOD, "cpu").ok
    assert launches.device_for_launches(seeing | {"nccl": True}, "auto") == "cuda"
    assert launches.device_for_launches(seeing, "auto") == "cpu"


ONE_GPU = GOOD | {"cuda": "13.0", "gpus": 1, "nccl": True}


def tried(parts: str, *, free: int = 70, last: str = "") -> Result:
    """The result of a program that names these parts, on a GPU of 80 GiB, and then does something else."""
    lines = [f"memory {free * 2**30} {80 * 2**30}", *(f"part {part}" for part in parts.split())]
    said = [f"print({line!r}, flush=True)" for line in lines]
    return gpu.check_gpu_works(ONE_GPU, limit_s=120, program="\n".join([*said, last]))


def test_a_gpu_works():
    assert tried("product Triton DALI NCCL end").detail == "product, Triton, DALI, NCCL; 70 of 80 GiB free"
    assert gpu.check_gpu_works(GOOD, limit_s=1, program="raise") == Result("a GPU works", True, "no GPU")
    named = re.findall(r'^at\("(\w+)"\)$', gpu.PROGRAM, re.MULTILINE)
    assert ["start", *named] == [*gpu.FAULTS, "end"] and compile(gpu.PROGRAM, "program", "exec")


@pytest.mark.parametrize(
    "parts, last, cause, fix",
    [
        ("product", "1 / 0", "the GPU does not compute: the trial ended with exit code 1: ZeroDivisionError", "dmesg"),
        ("Triton", "raise RuntimeError('no gcc')", "Triton cannot compile for the GPU: the trial ended", "gcc python3"),
        ("DALI", "assert 0, 'an image is wrong'", "DALI cannot decode an image on the GPU: the trial ended", "--force"),
        ("DALI NCCL", "import os; os.kill(os.getpid(), 11)", "in its part NCCL: the trial was killed by SI", "NCCL_D"),
        ("Triton", "import os; os.kill(os.getpid(), 9)", "in its part Triton: the trial was killed by SIGK", "gcc"),
        ("", "import os; os.kill(os.getpid(), 9)", "in its part start: the trial was killed by SIGKILL", "-c 'imp"),
        ("", "1 / 0", "the trial does not begin: the trial ended with exit code 1: ZeroDivisionError", "-c 'import"),
        ("NCCL end", "raise SystemExit(3)", "NCCL cannot reduce a tensor of the GPU: the trial ended", "NCCL_DEBUG"),
    ],
)
def test_a_part_of_a_gpus_work_fails(parts, last, cause, fix):
    assert_failed(tried(parts, last=last), cause=cause, fix=fix)


def test_a_gpu_that_another_process_fills():
    result = tried("product", free=7, last="raise MemoryError('CUDA out of memory')")
    cause = "only 7.0 of 80 GiB of the GPU are free: another process fills it"
    assert_failed(result, cause=cause, fix="nvidia-smi --query-compute-apps")


def test_a_driver_older_than_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "PROC", tmp_path)
    monkeypatch.setattr(gpu, "find_driver", lambda: driver.find_driver(tmp_path))
    write_driver(tmp_path, "535.104.05")
    cause = "driver 535.104.05 is older than 580, which torch's CUDA 13.0 needs, so torch sees no GPU"
    assert_failed(gpu.check_driver(ONE_GPU), cause=cause, fix="CUDA=12.6 mpi_scripts/install.sh")
    assert gpu.check_driver(ONE_GPU | {"cuda": "12.6"}).detail == "535.104.05, 2 GPUs" and gpu.check_driver(GOOD).ok


def test_locked_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ADAPTERS", tmp_path)
    limits = [65536, 65536]
    monkeypatch.setattr(gpu.resource, "getrlimit", lambda limit: tuple(limits))
    assert gpu.check_locked_memory() == Result("locked memory", True, "no InfiniBand")
    (tmp_path / "mlx5_0").mkdir()
    assert_failed(gpu.check_locked_memory(), cause="a process may lock 64 KiB", fix="memlock unlimited")
    limits[1] = -1
    assert_failed(gpu.check_locked_memory(), cause="a process may lock 64 KiB", fix="ulimit -l $(ulimit -H -l)")
    limits[0] = -1
    assert gpu.check_locked_memory().detail == "unlimited"


def test_no_gpu(programs):
    programs("nvidia-smi", "echo 'No devices were found'; exit 6")
    assert machine.check_gpu(GOOD, "auto").ok
    assert_failed(machine.check_gpu(GOOD, "cuda"), cause="no GPU is visible", fix="nvidia-smi -L")


# -- launches --------------------------------------------------------------------------------------------------

EXACT = launches.expected_total(2)


@pytest.mark.parametrize(
    "script, cause, fix",
    [
        (
            f"echo rank=0 size=1 total={EXACT}.; echo rank=0 size=1 total={EXACT}.",
            "sees a size of 1",
            "--force",
        ),
        (
            f"echo rank=0 size=2 total={EXACT}.; echo rank=1 size=2 total={EXACT + 1}.",
            f"should be {EXACT}",
            "--force",
        ),
        (f"echo rank=0 size=2 total={EXACT}.", "1 of 2 processes answered", "mpirun -np 2"),
        (
            "echo 'There are not enough slots' >&2; exit 1",
            "exit code 1: There are not enough slots",
            "mpirun -np 2",
        ),
        ("echo process=started.; kill -SEGV $$", "was killed by SIGSEGV: no message", "mpirun -np 2"),
        ("echo 'the cause'; echo '[n:1] PMIX ERROR: UNREACHABLE'; exit 1", "exit code 1: the cause", "mpirun -np 2"),
        (
            "printf 'could not be found:\\n  plm_rsh_agent: ssh : rsh\\nFORCE-TERMINATE\\n' >&2; exit 243",
            "mpirun looks for an ssh client, which is not installed, although one host needs none",
            "mpi_scripts/install.sh",
        ),
    ],
)
def test_launch_goes_wrong(programs, script, cause, fix):
    programs("mpirun", script)
    assert_failed(launches.check_allreduce("mpirun"), cause=cause, fix=fix)


def test_launch_hangs(programs):
    programs("mpirun", f"echo process=started.; echo rank=1 size=2 total={EXACT}.; sleep 600 & wait")
    cause = "did not end within 1 s: of 2 processes, 1 started, 0 met, 1 have the sum"
    result = launches.check_allreduce("mpirun", limit_s=1)
    assert_failed(result, cause=cause, fix="HOROVOD_LOG_LEVEL=debug mpirun -np 2")


@pytest.mark.parametrize("launch", launches.LAUNCHES)
def test_processes_say_how_far_they_came(launch):
    """Really launched, as a user of the doctor would see it: each launcher hands on what its processes print."""
    program = launches.TORCH_ALLREDUCE if launch == "torchrun" else launches.ALLREDUCE
    output = run([*launches.LAUNCHES[launch], sys.executable, "-c", program, "cpu"], limit_s=120)
    assert launches.progress(output) == "2 started, 2 met, 2 have the sum", output


@pytest.mark.parametrize("works_up_to, count", [(0, 1), (0, 5), (3, 5), (4, 5), (6, 20)])
def test_last_working(works_up_to, count):
    assert launches.last_working(lambda given: given <= works_up_to, count) == works_up_to


def test_a_variable_is_to_blame(monkeypatch):
    """Really launched: it kills both ranks. Two innocent variables stand beside it."""
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    result = launches.check_allreduce("mpirun")
    fix = "unset HOROVOD_CPU_OPERATIONS"
    assert_failed(result, cause="; without HOROVOD_CPU_OPERATIONS=gloo it works", fix=fix)


@pytest.mark.parametrize("obeyed", ["HOROVOD_CYCLE_TIME$", "(?!)"], ids=["a variable", "no variable"])
def test_no_variable_is_to_blame_for_chance(obeyed, programs, monkeypatch, tmp_path):
    """The first launch fails, whatever the variables are, and all later ones work."""
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    monkeypatch.setattr(launches, "OBEYED", re.compile(obeyed))
    right = " ".join(f"rank={rank} size=2 total={EXACT}." for rank in range(2))
    programs("mpirun", f'mkdir {tmp_path}/first 2>/dev/null && exit 3; echo "{right}"')
    cause = "mpirun ended with exit code 3: no message; the same command worked when it was repeated"
    assert_failed(launches.check_allreduce("mpirun"), cause=cause, fix="mpirun -np 2")


def test_what_stands_in_for_ssh_is_not_to_blame(programs, monkeypatch):
    """It would be taken away with the others, and without it nothing works where there is no ssh."""
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "ssh : rsh : /bin/sh /a/.venv/bin/largebatch-no-ssh")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "77")
    right = " ".join(f"rank={rank} size=2 total={EXACT}." for rank in range(2))
    programs("mpirun", f'[ -n "$OMPI_MCA_plm_rsh_agent" ] && [ -z "$HOROVOD_CYCLE_TIME" ] && echo "{right}"')
    result = launches.check_allreduce("mpirun")
    assert_failed(result, cause="; without HOROVOD_CYCLE_TIME=77 it works", fix="unset HOROVOD_CYCLE_TIME")


def test_several_variables_are_to_blame(monkeypatch):
    """Left over from an allocation that has ended: none alone does harm, without the last of them it works."""
    leftover = {"JOBID": "1", "NODELIST": "node1", "TASKS_PER_NODE": "4", "JOB_ID": "1", "JOB_NODELIST": "node1"}
    for name, value in leftover.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    result = launches.check_allreduce("mpirun")
    assert_failed(result, cause="; without SLURM_", fix="unset SLURM_")
    monkeypatch.delenv(result.fix.removeprefix("unset "))
    assert launches.check_allreduce("mpirun").ok


def test_a_variable_is_to_blame_under_torchrun(monkeypatch):
    """Really launched: Gloo looks for a card that is not there. torchrun adds a traceback of its own."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    result = launches.check_allreduce("torchrun")
    cause = "Unable to find address for: nope; without GLOO_SOCKET_IFNAME=nope it works"
    assert_failed(result, cause=cause, fix="unset GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("missing", [True, False])
def test_main_tries_torchrun_alone_without_horovod(horovod, monkeypatch, capsys, missing):
    """Ranks are really launched. A Horovod that is broken is an error, one that is not there is a note."""
    error = "ModuleNotFoundError(\"No module named 'horovod'\")" if missing else "ImportError('odd')"
    rewrite(horovod / "__init__.py", f"raise {error}")
    monkeypatch.setattr(command_line, "before_launching", lambda *arguments, **options: iter(()))
    assert command_line.main(["--device", "cpu"]) == (0 if missing else 1)
    printed = capsys.readouterr().out
    assert f"ok    2-process allreduce, torchrun: the sum is exactly {EXACT} on cpu\n" in printed
    assert "ok    several ranks: they start under torchrun\n" in printed
    assert printed.count("FAIL") == (0 if missing else 2) and ("ready to train" in printed) is missing
    assert ("FAIL  2-process allreduce, mpirun and horovodrun\n      cause: not tried" in printed) is not missing


def test_main_stops_where_horovod_does_not_load(horovod, monkeypatch, capsys):
    rewrite(horovod / "torch" / "mpi_ops.py", "raise ImportError('undefined symbol: _ZN5torch')")
    monkeypatch.setattr(installation, "check_imports", lambda **options: Result("package imports", True))
    assert command_line.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  Horovod imports" in printed and "fix:   mpi_scripts/install.sh --force" in printed
    assert "not tried, because a check above failed" in printed and "ready to train" not in printed
    assert "launchers" not in printed


def test_what_ails_mpirun_is_said_once(programs, monkeypatch, capsys):
    """horovodrun would start the same mpirun; Gloo does not need it."""
    for checks in ("before_launching", "of_horovod"):
        monkeypatch.setattr(command_line, checks, lambda *arguments, **options: iter(()))
    programs("mpirun", "exit 3")
    assert command_line.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == 1 and "mpirun ended with exit code 3" in printed
    assert "ok    several ranks: they start under horovodrun --gloo, torchrun\n" in printed
    assert "ok    2-process allreduce, horovodrun --gloo" in printed
