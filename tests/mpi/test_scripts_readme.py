"""The commands of mpi_scripts/README.md for one machine, as they stand there, but for a small model and two steps.

Those for several hosts and Slurm are run by tests/cluster/test_scripts.py.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from launch import ROOT, run

README = (ROOT / "mpi_scripts" / "README.md").read_text()
TINY = "--model vit_nano32 --model.img_size 64 --run.precision fp32 --data.micro_batch_size 2"
SHORT = f"{TINY} --data.global_batch_size 8 --run.max_steps 2 --log.to none"
HERE = {"VENV": sys.prefix}
SCRIPTS = sorted(path.name for path in (ROOT / "mpi_scripts").glob("*.*") if path.suffix in (".sh", ".sbatch"))
SCRIPTS.remove("env.sh")  # read by the others


def succeeds(command: str, *, cold: bool = False, **environment: str) -> str:
    """The scripts take Python from VENV."""
    venv = HERE if cold else {"VENV": str(warm.folder())}
    code, output = run(shlex.split(command), timeout_s=600, environment=venv | environment, cold=cold)
    assert code == 0, output
    return output


def trains(command: str, folder: Path, *, cold: bool = False) -> str:
    output = succeeds(f"{command} {SHORT} --run.folder {folder}", cold=cold)
    assert "8 = 2 ranks × 2 micro-batch × 2 passes" in output and "step 2 of" in output, output
    return output


def test_every_section_is_run_by_a_test():
    tests = Path(__file__).read_text() + (ROOT / "tests" / "cluster" / "test_scripts.py").read_text()
    tests += (ROOT / "tests" / "test_container.py").read_text()
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert headings == ["Laptop", "One node", "Several nodes", "Slurm", "torchrun", "Containers"]
    for heading in headings:
        assert f'scripts_readme("{heading}")' in tests


def test_every_script_is_in_the_readme():
    for path in (ROOT / "mpi_scripts").iterdir():
        assert path.suffix in (".png", ".md") or f"`{path.name}`" in README, path.name


def test_laptop(scripts_readme, tmp_path):
    for number, command in enumerate(scripts_readme("Laptop")):
        output = trains(command, tmp_path / str(number), cold=number == 0)
        assert "bind.sh" not in output or os.path.exists("/dev/nvidia0"), output


def test_one_node(scripts_readme, tmp_path):
    train, dry_run, scaling = scripts_readme("One node")
    assert train in scripts_readme("Laptop")
    assert len(re.findall(r"^bind.sh: \S+ local rank \d of 8: ", succeeds(dry_run), re.MULTILINE)) == 8
    options = f"--rounds 1 --recipe quickstart --data digits {TINY} --run.folder {tmp_path / 'run'}"
    output = succeeds(f"{scaling} {options}", OUTPUT=str(tmp_path), IMAGES="4", RANKS="1 2")
    assert re.search(r"^ +1 .* 100.0 % .*\n +2 ", output, re.MULTILINE), output
    assert "4 = 1 ranks × 2 micro-batch × 2 passes" in output and "8 = 2 ranks × 2 micro-batch × 2 passes" in output
    table = (tmp_path / "scaling.csv").read_text().splitlines()
    assert len(table) == 3 and (tmp_path / "scaling.png").exists()


def test_the_planner_is_validated_by_the_first_case(tmp_path):
    command = "mpi_scripts/validate_plan.sh 1:vit_nano32:2:1 2:vit_nano32:2:1"
    output = succeeds(command, OUTPUT=str(tmp_path), ROUNDS="1")
    row = r"^\| c \| vit_nano32, 2 ranks × 2 \| .* \| from vit_nano32, 1 rank × 2 \|$"
    assert len(re.findall(row, output, re.MULTILINE)) == 1, output


def test_torchrun(scripts_readme, tmp_path):
    plain, bound = scripts_readme("torchrun")
    trains(plain, tmp_path / "plain")
    output = trains(bound, tmp_path / "bound", cold=True)
    assert re.findall(r"^bind.sh: \S+ local rank (\d) of 2: ", output, re.MULTILINE) == ["0"], output


def test_ranks_are_bound_to_disjoint_parts():
    """Read back by each rank from the kernel."""
    output = succeeds("mpirun -np 2 --bind-to none mpi_scripts/bind.sh grep Cpus_allowed_list: /proc/self/status")
    lists = re.findall(r"Cpus_allowed_list:\s+(\S+)", output)
    assert len(lists) == 2, output
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        pytest.skip("one core: there is nothing to bind")
    from largebatch.launch.bind import numbers

    first, second = (set(numbers(text)) for text in lists)
    assert first | second == allowed and not first & second


def test_packing_and_fine_tuning(tmp_path):
    """pack_imagenet.sh on a few images, labels of a teacher for their cells, finetune_volo.sh from weights of another
    size, with its own measurement."""
    import numpy as np
    from PIL import Image

    import zoo

    noise = np.random.default_rng(0)
    for split, name in ((split, name) for split in ("train", "val") for name in ("cat", "dog")):
        (tmp_path / "images" / split / name).mkdir(parents=True)
        for k in range(4):
            pixels = noise.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{k}.JPEG")
    records, labelled, folder = tmp_path / "records", tmp_path / "labelled", tmp_path / "run"
    weights, teacher = tmp_path / "volo.safetensors", tmp_path / "teacher.safetensors"
    output = succeeds(f"mpi_scripts/pack_imagenet.sh {tmp_path / 'images'} {records} --shards 2 --validation-shards 1")
    assert "train: 8 images" in output and "mpirun" in output, output
    zoo.save_weights(zoo.create_model("volo_nano", img_size=64), weights)
    zoo.save_weights(zoo.create_model("vit_nano32", img_size=64, num_classes=2, global_pool="avg"), teacher)
    label = f"python -m largebatch.pack token-labels {records} {labelled} --teacher vit_nano32 --weights {teacher}"
    output = succeeds(f"{label} --num-classes 2 --img-size 64")
    assert "train: 8 images with label maps" in output, output
    tiny = "--model volo_nano --img-size 96 --model.num_classes 2"
    small = "--run.precision fp32 --run.max_steps 1 --data.micro_batch_size 2 --data.global_batch_size 4"
    tiny += f" {small} --log.to none --run.folder={folder}"
    output = succeeds(f"mpi_scripts/finetune_volo.sh volo_d1_384 {weights} {labelled} {tiny}")
    assert "recipe volo_d1_384" in output and "position embedding resized from 4 x 4 to 6 x 6" in output, output
    assert "images 8 " in output, output


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train_multinode.sh --model vit_b32", "give the hosts first, -H a:8,b:8 or --hostfile FILE"),
        ("train_multinode.sh -H", "-H needs a value, e.g. -H a:8,b:8"),
        ("train_multinode.sh --restarts -H a:8", "--restarts is '-H': expected how often a lost run may start again"),
        ("pack_imagenet.sh tars", "give the folder of ImageNet's tars or images, then the folder for the shards"),
        ("finetune_volo.sh volo_d1_384", "give a recipe (volo_d1_384, ...), weights at 224 px, and a folder"),
        ("scaling.sh -H a:8", 'with -H, give the numbers of ranks to measure, e.g. RANKS="8 16 32"'),
        ("scaling.sh -H", "-H needs a value, e.g. -H a:8,b:8"),
        ("validate_plan.sh vit_b32", "'vit_b32' is no case: expected e.g. 2:vit_b32:8:4"),
        ("train_slurm.sbatch --model vit_b32", "this is a script for Slurm: sbatch -N 2 "),
        ("train_multinode.sh --hostfile no/file", "--hostfile is no/file: there is no such file, or it cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(command, sentence):
    code, output = run(shlex.split(f"mpi_scripts/{command}"), timeout_s=20, environment=HERE)
    assert code == 1 and output.startswith(f"{command.split()[0]}: {sentence}"), output


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_script_says_how_it_is_used_and_runs_nothing(script, option, tmp_path):
    """Also where there is no .venv yet."""
    command, given = [f"mpi_scripts/{script}", option], os.environ | {"VENV": str(tmp_path)}
    output = subprocess.check_output(command, cwd=ROOT, env=given, text=True, timeout=60)
    head = "usage: bind.sh [-h]" if script == "bind.sh" else "What:     "
    assert output.startswith(head) and "usage: " in output.lower() and "set -" not in output
    assert not any(tmp_path.iterdir())


@pytest.fixture
def dying(tmp_path) -> Path:
    """An environment with the real mpirun, in which every rank ends with exit code 3."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").symlink_to(Path(sys.prefix, "bin", "activate"))
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    "text, slots",
    [
        ("localhost slots = 2", 2),
        ("# hosts\n\nlocalhost\tslots=2 # both cores\n", 2),
        ("  localhost max_slots=4 slots=3\n", 3),
        ("localhost slots= 1 max-slots=4\n", 1),
        ("localhost count=2\n", 2),
    ],
)
def test_a_restart_reads_the_hostfile_as_mpirun_does(dying, text, slots):
    file = dying / "my hosts"
    file.write_text(text)
    assert subprocess.run(["mpirun", "--hostfile", file, "-np", "1", "true"]).returncode == 0
    output = multinode(dying, "--restarts", "1", "--hostfile", file)
    assert f"restart 1 of 1 on localhost:{slots}, in 0 s" in output, output


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("localhost slots=2\r\n", "has the line ends of Windows, which mpirun refuses: sed -i 's/\\r$//' "),
        ("::1 slots=2\n", "names the host ::1: mpirun takes a name or an IPv4 address, then slots=8"),
        ("localhost:2\n", "names the host localhost:2: mpirun takes a name or an IPv4 address, then slots=8"),
    ],
)
def test_hostfiles_that_mpirun_refuses(dying, text, sentence):
    file = dying / "my hosts"
    file.write_text(text)
    assert subprocess.run(["mpirun", "--hostfile", file, "-np", "1", "true"], capture_output=True).returncode != 0
    output = multinode(dying, "--hostfile", file)
    assert output.startswith(f"train_multinode.sh: {file} {sentence}") and output.count("\n") == 1
    if "sed" in sentence:
        subprocess.run(output.partition("refuses: ")[2], shell=True, check=True)
        assert "restart 1 of 1 on localhost:2" in multinode(dying, "--restarts", "1", "--hostfile", file)


def multinode(venv: Path, *arguments: str | Path) -> str:
    command = ["mpi_scripts/train_multinode.sh", *arguments, "--model", "vit_b32"]
    given = os.environ | {"VENV": str(venv), "PAUSE_S": "0"}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    return done.stdout + done.stderr


READS = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # also root's own Python
NAMELESS = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", *READS]


@pytest.fixture
def nameless(tmp_path):
    """A function that runs a command as a user id without a name: with no HOME, or with the given one."""
    if not shutil.which("setpriv") or subprocess.run([*NAMELESS, "true"], capture_output=True).returncode != 0:
        pytest.skip("only root can become a user without a name, by setpriv")
    temporary = tmp_path / "t"
    temporary.mkdir()
    temporary.chmod(0o1777)

    def run_so(command: list[str], home: str | None) -> tuple[int, str]:
        given = [] if home is None else [f"HOME={home}"]
        start = ["env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "-u", "XDG_CACHE_HOME", f"TMPDIR={temporary}"]
        return run([*NAMELESS, *start, *given, *command], environment=HERE, cold=True)

    return run_so


@pytest.mark.parametrize("home", [None, "/", "/no/such/folder"])
def test_env_sh_gives_a_home_to_a_user_id_without_a_name(nameless, tmp_path, home):
    command = ["bash", "-ec", '. mpi_scripts/env.sh; echo "$HOME"; mpirun -np 2 true; echo ended']
    found = tmp_path / "t" / "largebatch-54321"
    assert nameless(command, home) == (0, f"{found}\nended\n")
    assert nameless(command, home) == (0, f"{found}\nended\n")
    shutil.rmtree(found)
    found.mkdir(mode=0o777)  # root's
    code, output = nameless(command, home)
    assert code == 1 and f"the user id 54321 has no name and no home, and {found} is not its own: set HOME" in output


def test_one_process_of_a_user_id_without_a_name(nameless):
    """Open MPI would end it in MPI_Init."""
    code, output = nameless(["python", "-m", "tests.mpi.programs", "places"], None)
    assert code == 0 and "places [(0, 1, 0, 1)]" in output, output


def test_what_env_sh_refuses(tmp_path):
    script = ["mpi_scripts/train_local.sh"]
    code, output = run(script, timeout_s=20, environment=HERE | {"INTERFACE": "nic9"})
    assert code == 1 and output.startswith("train_local.sh: INTERFACE=nic9 is no network card here, there are: ")
    code, output = run(script, timeout_s=20, environment={"VENV": str(tmp_path)})
    assert code == 1 and output.startswith(f"train_local.sh: there is no {tmp_path}: create it with")
