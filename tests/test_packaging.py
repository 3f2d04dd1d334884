"""The lists of requirements, the core that needs few of them, and the two archives in environments of their own."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from test_install import functions

import largebatch
from largebatch.process import installer
from largebatch.process.installer import install_command

ROOT = Path(__file__).parents[1]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
LISTS = {"core": CONFIG["options"]["install_requires"], **CONFIG["options.extras_require"]}
INSTALLED = ("core", "train", "horovod", "test")  # by install.sh
VERSIONS = ("3.11", "3.12", "3.13")
TRAIN = "--model vit_nano32 --run.max_steps 1 --data.global_batch_size 8 --data.micro_batch_size 4".split()
MADE = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "shared", "*.egg-info", "__pycache__", ".*_cache")


def requirements(name: str) -> dict[str, Requirement]:
    found = [Requirement(line) for line in LISTS[name].strip().splitlines()]
    return {requirement.name: requirement for requirement in found}


# -- lists -------------------------------------------------------------------------------------------------------


def test_the_lock_has_a_version_in_the_range_of_each_package_that_is_installed():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    locked = dict(line.split("==") for line in lines)
    ranges = [requirement for name in INSTALLED for requirement in requirements(name).items()]
    assert locked.keys() == dict(ranges).keys() and len(lines) == len(locked)
    for name, requirement in ranges:
        assert requirement.specifier.contains(locked[name]), (str(requirement), locked[name])


def test_install_sh_without_horovod_takes_what_the_train_extra_has():
    taken = functions("HOROVOD=no CUDA=''; requirements")
    names = [line.partition("==")[0] for line in taken.stdout.splitlines()]
    assert sorted(names) == sorted([*requirements("core"), *requirements("train")]), taken.stderr


def test_every_package_has_a_lower_limit_and_a_reason():
    text = (ROOT / "setup.cfg").read_text()
    for name in {*LISTS} - {"test"}:
        for requirement in requirements(name).values():
            assert any(one.operator == ">=" for one in requirement.specifier), requirement
    for block in re.findall(r"^(?:install_requires|train|horovod) =\n((?:    .*\n)+)", text, re.MULTILINE):
        packages = [line for line in block.splitlines() if line.strip()[0] != "#"]
        assert block.count("#") >= len(packages) - 4, block  # a reason may be that of two or three lines


def test_one_list_of_pythons():
    numbers = re.findall(r":: Python :: (3\.\d+)$", CONFIG["metadata"]["classifiers"], re.MULTILINE)
    assert tuple(numbers) == VERSIONS and CONFIG["options"]["python_requires"] == ">=3.11,<3.14"
    script = (ROOT / "mpi_scripts" / "install.sh").read_text()
    assert f"{' | '.join(VERSIONS)}) command -v" in script and "Python 3.11–3.13" in (ROOT / "README.md").read_text()


def test_one_version_and_one_author():
    citation = (ROOT / "CITATION.cff").read_text()
    for name in ("version", "license"):
        assert f"\n{name}: {CONFIG['metadata'][name]}\n" in citation
    assert CONFIG["metadata"]["version"] == largebatch.__version__
    assert f"- name: {CONFIG['metadata']['author']}\n" in citation


def test_the_command_that_installs(tmp_path):
    assert install_command("--force", settings="CUDA=12.6") == "CUDA=12.6 mpi_scripts/install.sh --force"
    assert installer.SCRIPT == ROOT / "mpi_scripts" / "install.sh"


def test_the_command_that_installs_is_for_this_environment_and_from_any_folder(tmp_path, monkeypatch):
    elsewhere = tmp_path / "with room"
    elsewhere.mkdir()
    monkeypatch.setattr(sys, "prefix", str(elsewhere))
    monkeypatch.setattr(installer, "MARKER", elsewhere / "largebatch-installed")
    monkeypatch.chdir(tmp_path)
    assert install_command() == f"{ROOT}/mpi_scripts/install.sh"  # it has not made this one
    installer.MARKER.write_text("horovod=none\n")
    assert installer.noted(installer.MARKER) == {"horovod": "none"}
    told = f"VENV='{elsewhere}' CUDA=12.6 {ROOT}/mpi_scripts/install.sh --force"
    assert install_command("--force", settings="CUDA=12.6") == told


def test_the_command_that_installs_where_a_wheel_lacks_the_script(tmp_path, monkeypatch):
    """It is that of the folder that pip took the package from, if this is still there."""

    def without_script(noted: str | None) -> str:
        monkeypatch.setattr(installer, "distribution", lambda name: SimpleNamespace(read_text=lambda file: noted))
        return install_command(settings="CUDA=12.6", script=tmp_path / "install.sh")

    folder, archive = tmp_path / "my clone", tmp_path / "largebatch.whl"
    folder.mkdir()
    archive.touch()
    assert without_script(json.dumps({"url": folder.as_uri()})) == f"CUDA=12.6 '{folder}'/mpi_scripts/install.sh"
    for noted in (None, json.dumps({"url": archive.as_uri()}), json.dumps({"url": (tmp_path / "gone").as_uri()})):
        assert without_script(noted) == "CUDA=12.6 FOLDER_OF_THE_SOURCES/mpi_scripts/install.sh"


@pytest.mark.parametrize(
    "listed, runs, foreign",
    [
        ("80,90", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], [(7, 0), (7, 5)]),  # the last is compiled for later GPUs
        ("90", [(9, 0), (10, 3)], [(8, 0), (8, 9)]),
        ("86,90", [(8, 9)], [(8, 0)]),
        ("80,100", [(8, 6), (10, 0), (10, 3)], [(9, 0)]),
        ("", [(7, 0), (12, 0)], []),
    ],
)
def test_gpus_that_horovods_kernels_do_not_run_on(tmp_path, listed, runs, foreign):
    marker = tmp_path / "largebatch-installed"
    assert not installer.foreign_gpu((7, 0), marker)
    marker.write_text(f"operations=nccl\narchitectures={listed}\nmpi=openmpi\n")
    assert not any(installer.foreign_gpu(gpu, marker) for gpu in runs)
    assert all(installer.foreign_gpu(gpu, marker) == listed for gpu in foreign)


CORE = """
import importlib.machinery, sys
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.startswith(tuple(sys.argv[1:])) else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
import torch
from largebatch import Lamb, TrainConfig, param_groups
from largebatch.recipes import RECIPES
from zoo import create_model, load_weights, save_weights
model = create_model("vit_nano32", img_size=64, num_classes=10)
optimizer = Lamb(param_groups(model, weight_decay=0.02), lr=1e-3, impl="eager")
model(torch.ones(2, 3, 64, 64)).sum().backward()
optimizer.step()
save_weights(model, "weights.safetensors")
load_weights(create_model("vit_nano32", img_size=64, num_classes=10), "weights.safetensors")
print(len(RECIPES), TrainConfig().optim.name)
"""


def test_the_zoo_and_lamb_need_the_core_alone(tmp_path):
    """Without all that timm and torch do not bring: Horovod, MPI, DALI, and what else training needs."""
    of_timm = {"numpy", "pillow", "torchvision", "PyYAML", "packaging", "cffi", "psutil"}
    hidden = {*requirements("train")} - of_timm - {"nvidia-dali-cuda120", "google-crc32c", "scikit-learn"}
    hidden |= {"horovod", "mpi4py", "cloudpickle", "nvidia.dali", "google_crc32c", "sklearn"}
    command = [sys.executable, "-c", CORE, *hidden]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith(" lamb\n"), done.stderr


# -- archives ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution of a copy of this tree, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("archives")
    shutil.copytree(ROOT, folder / "tree", ignore=MADE, symlinks=True)
    for kind, tree in (("sdist", "tree"), ("wheel", f"largebatch-{largebatch.__version__}")):
        program = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
        done = subprocess.run([sys.executable, "-c", program], cwd=folder / tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        if kind == "sdist":
            subprocess.run(["tar", "-xf", *folder.glob("*.tar.gz")], cwd=folder, check=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_the_source_distribution_is_whole(archives):
    with tarfile.open(archives[0]) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this tree is no clone of the repository, so it has no list of files")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()} - {".gitignore"}
    assert sorted(tracked - found) == []


def test_the_wheel_has_what_the_package_needs(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {*wheel.namelist()}
        described = wheel.read(*(name for name in names if name.endswith("/METADATA"))).decode()
    of_package = {
        str(path.relative_to(ROOT))
        for top in ("largebatch", "zoo")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".cpp", ".typed")
    }
    assert of_package == {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert any(name.endswith("licenses/LICENSE") for name in names) and "\nLicense: Apache-2.0\n" in described
    assert {*re.findall(r"^Provides-Extra: (.*)$", described, re.MULTILINE)} == {*LISTS} - {"core"}


def interpreter(version: str) -> str | None:
    """A Python of this version that can make environments, if there is one."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for candidate in [sys.executable, *candidates]:
        program = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        if candidate:
            asked = subprocess.run([candidate, "-c", program], capture_output=True, text=True)
            if asked.stdout.strip() == version:
                return str(candidate)
    return None


@pytest.mark.parametrize(
    "version", [VERSIONS[0], *(pytest.param(version, marks=pytest.mark.evidence) for version in VERSIONS[1:])]
)
def test_the_wheel_in_an_empty_environment(archives, tmp_path, version):
    """Its command answers, and says what is missing; so does the doctor."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    empty = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

    def run(*command: str | Path, code: int = 0) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=empty, capture_output=True, text=True, timeout=300)
        assert done.returncode == code and "Traceback" not in done.stderr, done
        return done.stdout + done.stderr

    run(python, "-m", "venv", "--without-pip", "venv")
    tools, pip = tmp_path / "venv" / "bin", [sys.executable, "-m", "pip", "--python"]
    run(*pip, tools / "python", "install", "--no-deps", "--no-index", archives[1])
    assert "largebatch train " in run(tools / "largebatch")
    assert f"Python {version}." in run(tools / "largebatch", "--version")
    assert "gradient accumulation" in " ".join(run(tools / "largebatch", "train", "--help").split())
    assert "did you mean --optim.lr?" in run(tools / "largebatch", "train", "--lr", "3", code=2)
    said = run(tools / "largebatch", "train", code=2)
    assert said.startswith("largebatch: this program needs the package torch, which ") and said.count("\n") == 1
    assert f"{archives[1]}[train]" in said
    told = run(tools / "largebatch", "doctor", code=1)
    assert "FOLDER_OF_THE_SOURCES/mpi_scripts/install.sh" in told and "-m pip install 'torch<3,>=2.13' " in told
    assert {path.name for path in tmp_path.iterdir()} == {"venv"}


EXTRAS = ("remote", "parquet", "mlflow", "onnx", "schedulefree")  # those of users; the examples' are in their tests
PARQUET = """
import io, pathlib
import numpy as np, pyarrow
from PIL import Image
from pyarrow import parquet
pathlib.Path("images").mkdir()
for split, count in (("train", 32), ("validation", 8)):
    images = []
    for seed in range(count):
        Image.fromarray(np.full((64, 64, 3), 7 * seed, np.uint8)).save(file := io.BytesIO(), "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    table = pyarrow.table({"image": images, "label": [seed % 2 for seed in range(count)]})
    parquet.write_table(table, f"images/{split}-00000-of-00001.parquet")
"""


@pytest.mark.evidence
@pytest.mark.parametrize(
    "installer, version", [*(("uv", version) for version in VERSIONS), ("install.sh", VERSIONS[0])]
)
def test_the_wheel_trains_on_two_ranks_without_horovod_and_a_compiler(archives, tmp_path, installer, version):
    """In an empty environment, where torchrun starts the ranks. Its packages are downloaded: 1 to 7 GB on the disk."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    venv = tmp_path / "venv"
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    found = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    given = {"VENV": str(venv), "PYTHON": python, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    given |= {"MLFLOW_TRACKING_URI": "sqlite:///tracked.db", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def run(*command: str | Path) -> str:
        where = {"cwd": tmp_path, "env": inherited | found | given}
        done = subprocess.run(command, **where, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if installer == "uv":
        run(python, "-m", "venv", "--without-pip", venv)
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", tmp_path / "tool", "uv")
        (tmp_path / "limits.txt").write_text(f"torch=={metadata.version('torch').partition('+')[0]}\n")
        uv = [tmp_path / "tool/bin/uv", "pip", "install", "--python", venv / "bin/python", "-c", "limits.txt"]
        run(*uv, f"{archives[1]}[train]")
    else:
        assert "no Horovod" in run(archives[0].parent / "tree/mpi_scripts/install.sh", "--no-horovod")
    assert not {path.name for path in (venv / "bin").iterdir()} & {"mpirun", "horovodrun", "pytest"}
    told = run(venv / "bin/largebatch", "doctor", "--device", "cpu")
    assert "ok    several ranks: they start under torchrun\n" in told and "FAIL" not in told
    launched = [venv / "bin/torchrun", *"--standalone --nproc-per-node 2 -m largebatch.train".split()]
    run(*launched, *TRAIN, "--run.device", "cpu", "--run.folder", "run")
    assert (tmp_path / "run" / "steps.csv").read_text().count("\n") == 2
    if installer == "uv":
        run(*uv, f"{archives[1]}[train,{','.join(EXTRAS)}]")
        run(venv / "bin/python", "-c", PARQUET)
        others = ["--optim.name", "schedule_free_adamw", "--schedule.name", "constant", "--log.to", "mlflow"]
        run(*launched, *TRAIN, *others, "--data", "images", "--run.device", "cpu", "--run.folder", "other")
        run(venv / "bin/largebatch", "export", "other", "model.onnx")
        assert (tmp_path / "tracked.db").stat().st_size and (tmp_path / "model.onnx").stat().st_size
        run(venv / "bin/python", "-c", "from fsspec import filesystem; filesystem('s3', anon=True)")
    shutil.rmtree(tmp_path)  # also uv's cache, or the next environment has no room
