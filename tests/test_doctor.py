"""The doctor against installations that are broken on purpose: it must name the cause and one command.

What is broken is put in front of the real thing, as it happens to users: a package that shadows Horovod
through PYTHONPATH, another program called mpirun on PATH. The launches at the end are real.
"""

import importlib.metadata
import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from largebatch import doctor

GOOD = {
    "version": "0.28.1",
    "built_for": "2.13.0",
    "torch": "2.13.0",
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
def fake_horovod(tmp_path, monkeypatch):
    """A function that shadows Horovod with a package whose torch part holds the given code."""

    def shadow(torch_code: str, metadata: str = '{"pytorch": "2.13.0"}') -> None:
        package = tmp_path / "shadow" / "horovod"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("__version__ = '0.28.1'\n")
        (package / "torch.py").write_text(torch_code)
        (package / "metadata.json").write_text(metadata)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))

    return shadow


def assert_failed(result: doctor.Result, *, cause: str, fix: str) -> None:
    assert not result.ok
    assert cause in result.cause and "\n" not in result.cause
    assert fix in result.fix and "\n" not in result.fix


# ---- versions and imports ------------------------------------------------------------------------


def fake_distributions(monkeypatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["aa==1.0", "bb==2.0", 'cc==3; extra == "test"']
    )


def test_versions_as_pinned(monkeypatch):
    fake_distributions(monkeypatch, {"aa": "1.0+cpu", "bb": "2.0"})
    assert doctor.check_versions() == doctor.Result("package versions", True, "2 packages as pinned")


def test_version_differs(monkeypatch):
    fake_distributions(monkeypatch, {"aa": "1.0", "bb": "2.1"})
    assert_failed(
        doctor.check_versions(), cause="bb==2.0 is needed, 2.1 is installed", fix="pip install 'bb==2.0'"
    )


def test_package_missing(monkeypatch):
    fake_distributions(monkeypatch, {"aa": "1.0"})
    assert_failed(doctor.check_versions(), cause="bb==2.0 is not installed", fix="mpi_scripts/install.sh")


def test_project_not_installed(monkeypatch):
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert_failed(doctor.check_versions(), cause="not installed for", fix="mpi_scripts/install.sh")


def test_import_fails(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("raise OSError('libodd.so: file too short')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = doctor.check_imports(("json", "broken_part", "math"))
    assert_failed(
        result, cause="importing broken_part failed: OSError: libodd.so: file too short", fix="--force"
    )
    assert doctor.check_imports(("json", "math")).ok


# ---- Horovod -------------------------------------------------------------------------------------


def horovod_result() -> doctor.Result:
    return doctor.check_horovod(*doctor.horovod_facts())


@pytest.mark.parametrize(
    "code, cause, fix",
    [
        (
            "raise ImportError('/x/mpi_lib_v2.so: undefined symbol: _ZN3c105ErrorE')",
            "compiled for another torch than the one installed (undefined symbol _ZN3c105ErrorE)",
            "install.sh --force",
        ),
        (
            "raise ModuleNotFoundError(\"No module named 'horovod'\")",
            "Horovod is not installed for",
            "install.sh",
        ),
        (
            "raise ImportError('libmpi.so.40: cannot open shared object file: No such file or directory')",
            "libmpi.so.40, which Horovod was linked with, is not found",
            "install.sh --force",
        ),
        (
            "raise ImportError('Extension horovod.torch has not been built: x not found')",
            "without its torch extension",
            "install.sh --force",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "was killed by SIGSEGV",
            "install.sh --force",
        ),
        ("raise RuntimeError('something else')", "RuntimeError: something else", "install.sh --force"),
    ],
)
def test_horovod_does_not_load(fake_horovod, code, cause, fix):
    fake_horovod(code)
    assert_failed(horovod_result(), cause=cause, fix=fix)


def test_horovod_built_for_another_torch(fake_horovod):
    flags = "def mpi_built(): return True\ngloo_built = nccl_built = mpi_built\n"
    fake_horovod(flags, metadata='{"pytorch": "1.0.0"}')
    facts, output = doctor.horovod_facts()
    assert doctor.check_horovod(facts, output).ok
    assert_failed(
        doctor.check_built_for(facts), cause="built for torch 1.0.0, torch 2.", fix="install.sh --force"
    )


def test_controllers_missing():
    assert doctor.check_controllers(GOOD).ok
    result = doctor.check_controllers(GOOD | {"gloo": False})
    assert_failed(result, cause="built without Gloo", fix="install.sh --force")
    assert "MPI and Gloo" in doctor.check_controllers(GOOD | {"mpi": False, "gloo": False}).cause


# ---- launchers, host name, GPU -------------------------------------------------------------------


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
    assert_failed(doctor.check_launchers(GOOD), cause="mpirun is not on PATH", fix="/bin/activate")


def test_no_horovodrun(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_failed(doctor.check_launchers(GOOD), cause="horovodrun is not on PATH", fix="/bin/activate")


def test_horovodrun_of_another_python(our_bin, programs):
    programs("horovodrun", "exit 0")
    programs("mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    assert_failed(doctor.check_launchers(GOOD), cause="belongs to another Python", fix="/bin/activate")


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
    assert_failed(doctor.check_launchers(GOOD), cause=cause, fix="i")


def test_mpirun_is_horovods(our_bin):
    (our_bin / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n")
    (our_bin / "mpirun").chmod(0o755)
    assert doctor.check_launchers(GOOD).ok


def test_host_name_does_not_resolve(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert_failed(doctor.check_hostname(), cause="no-such-host.invalid, does not resolve", fix="/etc/hosts")


def test_gpu(programs):
    programs("nvidia-smi", "echo 'GPU 0: some (UUID: GPU-1)'; echo 'GPU 1: some (UUID: GPU-2)'")
    assert_failed(doctor.check_gpu(GOOD, "auto"), cause="built without CUDA", fix="install.sh --force")
    blind = GOOD | {"cuda": "13.0"}
    assert_failed(doctor.check_gpu(blind, "auto"), cause="torch (CUDA 13.0) sees none", fix="nvidia-smi")
    seeing = blind | {"gpus": 2}
    assert_failed(doctor.check_gpu(seeing, "auto"), cause="built without NCCL", fix="OPERATIONS=nccl")
    assert doctor.check_gpu(seeing | {"nccl": True}, "auto").ok
    assert doctor.check_gpu(GOOD, "cpu").ok
    assert doctor.device_for_launches(seeing | {"nccl": True}, "auto") == "cuda"
    assert doctor.device_for_launches(seeing, "auto") == "cpu"


def test_no_gpu(programs):
    programs("nvidia-smi", "echo 'No devices were found'; exit 6")
    assert doctor.check_gpu(GOOD, "auto").ok
    assert_failed(doctor.check_gpu(GOOD, "cuda"), cause="no GPU is visible", fix="nvidia-smi -L")


# ---- launches ------------------------------------------------------------------------------------

EXACT = doctor.EXPECTED_TOTAL


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
        ("kill -SEGV $$", "was killed by SIGSEGV", "mpirun -np 2"),
    ],
)
def test_launch_goes_wrong(programs, script, cause, fix):
    programs("mpirun", script)
    assert_failed(doctor.check_allreduce("mpirun"), cause=cause, fix=fix)


def test_launch_hangs(programs):
    programs("mpirun", "sleep 600 & wait")
    result = doctor.check_allreduce("mpirun", limit_s=0.2)
    assert_failed(result, cause="no answer within 0.2 s", fix="HOROVOD_LOG_LEVEL=debug mpirun -np 2")


def test_main_stops_where_horovod_does_not_load(fake_horovod, monkeypatch, capsys):
    fake_horovod("raise ImportError('undefined symbol: _ZN5torch')")
    monkeypatch.setattr(doctor, "check_imports", lambda: doctor.Result("package imports", True))
    assert doctor.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  Horovod imports" in printed and "fix:   mpi_scripts/install.sh --force" in printed
    assert "allreduce" not in printed and "ready to train" not in printed


def test_main_does_not_launch_after_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "check_imports", lambda: doctor.Result("package imports", False, cause="c", fix="f")
    )
    assert doctor.main(["--device", "cpu"]) == 1
    assert "not tried, as a check above failed" in capsys.readouterr().out


def test_this_installation_can_train(capsys):
    """The real thing: both launchers and Gloo, two processes each."""
    assert doctor.main(["--device", "cpu"]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert printed.count(f"the sum is exactly {EXACT} on cpu") == len(doctor.LAUNCHES) == 3
    assert "FAIL" not in printed and "ready to train" in printed
