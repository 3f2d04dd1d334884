"""install.sh's way for CUDA, for real: torch for CUDA 13, NVIDIA's compiler from the registry, Horovod with NCCL.

No GPU is needed: what runs on one is in tests/gpu. A Horovod that install.sh has built before comes from its cache.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_install import OUR_VARIABLES, assert_refused, functions, program
from test_packaging import MADE, VERSIONS, interpreter

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.evidence
TRAIN = "--model vit_nano32 --run.max_steps 1 --data.global_batch_size 8 --data.micro_batch_size 4".split()
LOADED = """
import pathlib, re, torch, horovod.torch as hvd
maps = pathlib.Path("/proc/self/maps").read_text()
print(hvd.nccl_built(), "%d%02d%02d" % torch.cuda.nccl.version(), hvd.mpi_built(), hvd.gloo_built(), torch.version.cuda)
print(*sorted({*re.findall(r" (/.*/lib(?:nccl|cudart|mpi)\\.so\\.[^/\\n]*)$", maps, re.MULTILINE)}), sep="\\n")
print(hvd.mpi_lib_v2.__file__)
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory) -> Path:
    """A .venv for CUDA 13, made on a host whose nvcc is of CUDA 12, for the newest Python there is."""
    folder = tmp_path_factory.mktemp("cuda")
    tree, tools = folder / "tree", folder / "tools"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=MADE)
    tools.mkdir()
    program(tools / "nvcc", "echo 'Cuda compilation tools, release 12.2, V12.2.140'")
    given = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "CUDA_HOME": "",
        "CUDA": "13.0",
        "OPERATIONS": "nccl",
        "PYTHON": next(filter(None, map(interpreter, reversed(VERSIONS))), sys.executable),
        "PIP_FIND_LINKS": str(tools),  # not a folder with a build for CPUs, of which pip may have been told
    }
    environment = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES} | given
    done = subprocess.run(
        ["mpi_scripts/install.sh"], cwd=tree, env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    assert "Horovod with NCCL operations: nvcc is that of the registry (CUDA 13.0)\n" in done.stdout
    return tree / ".venv"


@pytest.fixture
def run(venv, tmp_path):
    """A function that runs a program of this .venv."""

    def run(*command: str, code: int = 0, **variables: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
        environment = inherited | {"XDG_CACHE_HOME": str(tmp_path / "cache")} | variables
        where = {"cwd": venv.parent, "env": environment}
        done = subprocess.run([venv / "bin" / command[0], *command[1:]], **where, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_horovod_is_linked_with_the_nccl_that_torch_loads(venv, run):
    numbers, *libraries, extension = run("python", "-c", LOADED).splitlines()[-5:]
    built, loaded, mpi, gloo, cuda = numbers.split()
    assert built == loaded and int(built) > 20000 and (mpi, gloo, cuda) == ("True", "True", "13.0")
    assert [Path(library).name for library in libraries] == ["libmpi.so.40", "libcudart.so.13", "libnccl.so.2"]
    assert all(Path(library).is_relative_to(venv) for library in libraries)
    code = Path(extension).read_bytes()
    assert {*re.findall(rb"-arch (sm_\d+)", code)} >= {b"sm_80", b"sm_90", b"sm_100"}
    assert b"\0libcuda.so.1\0" in code and b"\0libcuda.so\0" not in code  # the name that every driver has


def test_the_doctor_finds_no_driver_and_trains_on_cpus(run):
    said = run("python", "-m", "largebatch.doctor")
    for line in ("NVIDIA's driver: no driver", "GPU and NCCL: no GPU is visible, so training uses the CPU"):
        assert f"\nok    {line}\n" in said, said
    assert said.endswith("all checks passed: ready to train\n")


def test_training_is_refused_on_a_gpu_and_runs_on_cpus(run, tmp_path):
    train = ["python", "-m", "largebatch.train", *TRAIN, "--run.folder", str(tmp_path / "run"), "--run.device"]
    refused = [line for line in run(*train, "cuda", code=2).splitlines() if line.startswith("largebatch: ")]
    assert len(refused) == 1 and "has no NVIDIA driver: expected a host with GPUs, or cpu." in refused[0]
    assert not (tmp_path / "run" / "checkpoints").exists()
    run("mpirun", "-np", "2", *train, "cpu")
    assert (tmp_path / "run" / "checkpoints" / "00000001" / "model.safetensors").exists()


def test_a_second_nccl(venv, run, tmp_path):
    """It is an empty library: on the usual path it has no effect, and one that is preloaded is named."""
    other = tmp_path / "libnccl.so.2"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{other.name}", "-o", other], check=True)
    said = run("python", "-c", LOADED, LD_LIBRARY_PATH=str(tmp_path))
    assert str(other) not in said and said.count("libnccl") == 1
    said = run("python", "-m", "largebatch.train", code=2, LD_PRELOAD=str(other))
    assert said.startswith("largebatch: another NCCL than torch's is loaded and lacks nccl") and said.count("\n") == 1
    said = run("python", "-m", "largebatch.doctor", code=1, LD_PRELOAD=str(other))
    assert "\n      fix:   unset LD_PRELOAD\n" in said and "another torch than the one" not in said, said


def test_a_compiler_that_is_too_new_for_nvcc(venv, tmp_path):
    """It says that it is GCC 99; nvcc asks no more."""
    script = "CUDA=13.0 OPERATIONS=nccl NVCC_RELEASE=13.0; torch_facts; take_nvcc; check_nvcc; CXX=$NEW; check_nvcc"
    new = program(tmp_path / "g++", 'exec g++ -U__GNUC__ -D__GNUC__=99 "$@"')
    result = functions(script, VENV=str(venv), CXX="g++", NEW=new)
    assert_refused(result, f"nvcc (CUDA 13.0) does not work with {new} (unsupported GNU version! gcc versions later th")
    assert result.stderr.endswith("are not supported!): name another compiler with CXX=..., or another toolkit with "
                                  "CUDA_HOME=...\n")  # fmt: skip


def test_horovod_for_cpus_looks_for_no_compiler_of_cuda(venv, tmp_path):
    """Although torch is for CUDA, and a CUDA_HOME is there, which has no nvcc that works."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "nvcc", "exit 1")
    script = """
        OPERATIONS=cpu MPI=wheel CUDA=13.0; trap tidy_build EXIT; torch_facts; choose_work; unpack_source
        cd "$WORK/horovod-$HOROVOD_VERSION"; patch_horovod; export MPI_HOME=$WORK/mpi PATH=$VENV/bin:$PATH
        cmake -G Ninja -S . -B configured -DCMAKE_LIBRARY_OUTPUT_DIRECTORY_RELWITHDEBINFO="$WORK" \
            -DPYTHON_EXECUTABLE="$VENV/bin/python" -DCMAKE_BUILD_TYPE=RelWithDebInfo
    """
    chosen = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    result = functions(script, VENV=str(venv), CUDA_HOME=str(tmp_path), HOROVOD_CPU_OPERATIONS="MPI", **chosen)
    assert result.returncode == 0, result.stdout + result.stderr
