"""The commands of mpi_scripts/README.md for several nodes and for Slurm, on real ones: as they stand there, but for the
hosts' names and numbers, a small model and few steps."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import warm
from hosts import Hosts, wait_for

TINY = "--model vit_nano32 --model.img_size 64 --run.precision fp32 --log.to none"
SHORT = f"{TINY} --data.global_batch_size 8 --data.micro_batch_size 2 --run.max_steps 2"
HERE = {"VENV": sys.prefix}
LIMIT_S = 400
RESTARTS = ["mpi_scripts/train_multinode.sh", "--restarts", "2", "-H", "h1,h2"]


def venv(*, cold: bool) -> dict[str, str]:
    """Where the scripts take Python from. The first of a section's commands has cold ranks, as a user's."""
    return HERE if cold else {"VENV": str(warm.folder())}


def on_hosts(hosts: Hosts, command: str, *, cold: bool = True) -> str:
    """Run a command of the README on h1; its output."""
    command = command.replace("a:8,b:8", "h1:1,h2:1").replace("-np 16", "-np 2")
    words = shlex.split(f"env {command}")            # INTERFACE=eth0 may stand before it
    code, output = hosts.run("h1", words, timeout_s=LIMIT_S, environment=venv(cold=cold))
    assert code == 0, output
    return output


def test_the_doctor_first(hosts, scripts_readme):
    examine, recommend, *_ = scripts_readme("Several nodes")
    assert "FAIL" not in on_hosts(hosts, examine)
    assert "-H h1:1,h2:1" in on_hosts(hosts, recommend)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_several_nodes(hosts, scripts_readme, tmp_path, number):
    (tmp_path / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    assert len(scripts_readme("Several nodes")) == 5
    command = scripts_readme("Several nodes")[number].replace("hosts.txt", str(tmp_path / "hosts.txt"))
    output = on_hosts(hosts, f"{command} {SHORT} --run.folder {tmp_path / 'run'}", cold=number == 2)
    assert "8 = 2 ranks × 2 micro-batch × 2 passes" in output and "step 2 of" in output, output
    assert re.search(r"\bh1: rank 0\b", output) and re.search(r"\bh2: rank 1\b", output), output


def test_only_the_named_variables_travel(hosts, tmp_path):
    """What the rank on the other host finds in its environment."""
    command = f"mpi_scripts/train_multinode.sh -H h1:1,h2:1 {SHORT} --run.folder {tmp_path / 'run'}"
    ours = {"SECRET": "s3cret", "CHOSEN": "yes", "TRAVEL": "CHOSEN UNSET", "INTERFACE": "eth0"}
    job = hosts.start("h1", shlex.split(command), environment=HERE | ours)

    def ranks() -> list[int]:
        return [pid for pid, line in hosts.processes("h2").items() if f"{sys.prefix}/bin/python -m" in line]

    wait_for(ranks, "a rank on h2", LIMIT_S)
    words = Path(f"/proc/{ranks()[0]}/environ").read_text().split("\0")
    found = dict(word.split("=", 1) for word in words if "=" in word)
    assert found["CHOSEN"] == "yes" and found["NCCL_SOCKET_IFNAME"] == "=eth0" and found["VENV"] == sys.prefix
    assert "SECRET" not in found and "UNSET" not in found
    assert found["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    assert any("orted" in line and "oob_tcp_if_include" in line for line in hosts.processes("h2").values())
    hosts.clear()
    job.wait(30)


def test_a_run_that_lost_a_host_goes_on_with_the_others(hosts, tmp_path):
    """Its options are those of the first start; the last checkpoint is that of the fourth step or a later one."""
    (tmp_path / "hosts.txt").write_text("# two hosts\nh1 slots=1\nh2  max_slots=2 slots=1\n")
    command = ["mpi_scripts/train_multinode.sh", "--restarts", "2", "--hostfile", str(tmp_path / "hosts.txt")]
    options = [*SHORT.split(), "--run.max_steps", "40", "--run.folder", str(tmp_path / "run")]
    environment = HERE | {"PAUSE_S": "0", "RANKS": "2"}
    job = hosts.start("h1", [*command, *options, "--checkpoint.every", "4 steps"], environment=environment)
    wait_for(lambda: list(tmp_path.glob("run/checkpoints/0*/manifest.json")), "a checkpoint", LIMIT_S)
    hosts.kill("h2")
    code, output = job.wait(LIMIT_S)
    assert code == 0 and "Hosts that do not answer ssh: h2." in output, output
    assert "restart 1 of 2 on h1:1, in 0 s" in output and "restart 2" not in output, output
    before, after = output.split("restart 1 of 2")
    assert "8 = 2 ranks × 2 micro-batch × 2 passes" in before, output
    assert "8 = 1 rank × 2 micro-batch × 4 passes" in after and "step 40 of" in after, output
    assert "step 1/" not in after, output


@pytest.mark.parametrize(
    "host, process, told", [("h1", "train_multinode.sh", "TERM"), ("h2", "bin/python -m", "USR1")]
)
def test_a_run_that_was_told_to_end_is_not_started_again(hosts, tmp_path, host, process, told):
    """The script gets the signal, or a rank: mpirun ends it then with the code of a run that is to be resumed."""
    options = f"{TINY} --data.global_batch_size 8 --data.micro_batch_size 2 --run.folder {tmp_path / 'run'}".split()
    job = hosts.start("h1", [*RESTARTS, *options], environment=venv(cold=False))
    job.wait_for_line("step 1/", LIMIT_S)
    os.kill(process_of(hosts, host, process), signal.Signals[f"SIG{told}"])
    code, output = job.wait(LIMIT_S)
    assert (code == 75 or told == "TERM" and code != 0) and "restart 1" not in output, output


def test_a_signal_in_the_pause_ends_it_with_the_code_of_the_run(hosts, tmp_path):
    options = f"{TINY} --data.global_batch_size 8 --data.micro_batch_size 2 --run.folder {tmp_path / 'run'}".split()
    # A shell cannot hear Ctrl-C if it was ignored when the shell began, as in tests that run in the background.
    command = ["env", "--default-signal=INT", *RESTARTS, *options]
    job = hosts.start("h1", command, environment=venv(cold=False) | {"PAUSE_S": "1000"})
    job.wait_for_line("step 1/", LIMIT_S)
    os.kill(process_of(hosts, "h2", "bin/python -m"), signal.SIGKILL)
    job.wait_for_line("restart 1 of 2 on h1:1,h2:1, in 1000 s", LIMIT_S)
    os.kill(process_of(hosts, "h1", "train_multinode.sh"), signal.SIGINT)
    code, output = job.wait(LIMIT_S)
    assert f"the run ended with exit code {code}. Hosts that do not answer ssh: none." in output, output


def process_of(hosts: Hosts, host: str, words: str) -> int:
    """Return the oldest process of a host with these words in its command line."""
    return min(pid for pid, line in hosts.processes(host).items() if words in line)


def test_a_mistake_is_not_started_again(hosts):
    code, output = hosts.run("h1", RESTARTS, environment=venv(cold=False) | {"PAUSE_S": "0.1"}, timeout_s=LIMIT_S)
    assert code == 1 and "PAUSE_S is '0.1': expected whole seconds" in output, output
    code, output = hosts.run("h1", [*RESTARTS, "--no-such-option"], environment=venv(cold=False), timeout_s=LIMIT_S)
    assert code == 2 and "restart 1" not in output, output


def submit(slurm, command: str, *options: str, cold: bool = True, **variables: str) -> str:
    """Submit a command of the README, one task on each of two nodes; the job's number."""
    words, environment = shlex.split(command), venv(cold=cold) | variables
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words[0] == "sbatch"
    arguments = [word.replace("--ntasks-per-node=8", "--ntasks-per-node=1") for word in words[1:]]
    return slurm.sbatch(*options, *arguments, environment=environment)


@pytest.mark.parametrize("number", [0, 1])
def test_slurm(slurm, scripts_readme, tmp_path, number):
    assert len(scripts_readme("Slurm")) == 2
    command = f"{scripts_readme('Slurm')[number]} {SHORT} --run.folder {tmp_path / 'run'}"
    form = {"SLURM_TIME_FORMAT": "relative"} if number else {}  # of the user, whose variables a job has
    job = submit(slurm, command, f"--output={tmp_path / 'log'}", cold=number == 0, **form)
    state = slurm.wait(job, timeout_s=LIMIT_S)
    log = (tmp_path / "log").read_text()
    assert state == ("COMPLETED", 0), log
    assert "8 = 2 ranks × 2 micro-batch × 2 passes" in log and "step 2 of" in log, log
    assert re.search(r"--run.end_time 20\d\d-\d\d-\d\dT", log), log
    assert len(re.findall(r"^bind.sh: h[12] local rank 0 of 1: ", log, re.MULTILINE)) == 2, log


@pytest.mark.parametrize("died", ["h1", "h2"])
def test_a_rank_that_dies_at_its_start_ends_the_job(slurm, scripts_readme, tmp_path, died):
    """Slurm by itself lets the other rank wait in MPI_Init until the time limit of the job."""
    place = tmp_path / "venv"
    (place / "bin").mkdir(parents=True)
    real, python = f"{sys.prefix}/bin", place / "bin" / "python"
    dies = f'[ "$(hostname)" != {died} ] || kill -SEGV $$'
    python.write_text(f'#!/bin/sh\necho "a fence is a $SLURM_PMIX_FENCE"\n{dies}\nexec {real}/python "$@"\n')
    python.chmod(0o755)
    (place / "bin" / "activate").write_text(f". {real}/activate\n")
    log = tmp_path / "log"
    command = f"{scripts_readme('Slurm')[1]} {SHORT} --run.folder {tmp_path / 'run'}"
    job = submit(slurm, command, f"--output={log}", VENV=str(place), SLURM_WAIT="10")
    state, code = slurm.wait(job, timeout_s=LIMIT_S)
    assert state == "FAILED" and code in (128 + signal.SIGSEGV, 128 + signal.SIGKILL), log.read_text()
    assert "First task exited 10s ago" in log.read_text() and "a fence is a tree\n" in log.read_text()


def test_a_job_that_is_signalled_goes_on_later(slurm, scripts_readme, tmp_path):
    """As before the time limit: the batch script gets SIGUSR1, all ranks stop, the job is queued again and resumes."""
    log = tmp_path / "log"

    def wait_for_line(text: str) -> None:
        wait_for(lambda: log.exists() and text in log.read_text(), f"{text!r} of job {job}", LIMIT_S)

    command = f"{scripts_readme('Slurm')[0]} {SHORT} --run.max_steps 1000 --run.folder {tmp_path / 'run'}"
    job = submit(slurm, command, f"--output={log}")
    wait_for_line("step 1/")
    assert slurm.run(["scancel", "--batch", "--signal=USR1", job], timeout_s=60)[0] == 0
    wait_for_line("resumed at step ")
    assert slurm.wait_for_state(job, "RUNNING")["Restarts"] == "1"
    assert slurm.run(["scancel", job], timeout_s=60)[0] == 0
    assert slurm.wait(job, timeout_s=60)[0] == "CANCELLED"
    text = log.read_text()
    assert re.search("SIGUSR1 reached [12] of 2 ranks", text), text
    assert len(re.findall(r"^\+ ", text, re.MULTILINE)) == 2, text


def test_a_job_submitted_from_elsewhere(slurm, tmp_path):
    script = Path(__file__).parents[2] / "mpi_scripts" / "train_slurm.sbatch"
    submit_there = f"cd {tmp_path} && sbatch --parsable --output=log -N 1 --ntasks-per-node=1 {script}"
    code, output = slurm.run(["sh", "-c", submit_there], timeout_s=20, environment=HERE)
    assert code == 0, output
    assert slurm.wait(output.strip(), timeout_s=60) == ("FAILED", 1)
    assert (tmp_path / "log").read_text() == f"submit this job from the repository, not from {tmp_path}\n"


@pytest.mark.parametrize("number", [3, 5])
def test_containers_as_slurm_is_asked_for_them(slurm, scripts_readme, tmp_path, number):
    """The command of the job; this Slurm has no Pyxis, and the machine no Apptainer, so it ends there."""
    command = f"{scripts_readme('Containers')[number].replace('$PWD', str(tmp_path))} {SHORT}"
    job = submit(slurm, command, f"--output={tmp_path / 'log'}")
    assert slurm.wait(job, timeout_s=60)[0] == "FAILED"
    (line,) = re.findall(r"^\+ (.*)$", (tmp_path / "log").read_text(), re.MULTILINE)
    srun = "srun --cpu-bind=none --wait=300 --mpi=pmix"
    root = os.getcwd()
    program = "/opt/largebatch/mpi_scripts/bind.sh /opt/largebatch/.venv/bin/python -m largebatch.train --run.end_time"
    pyxis = f"--container-image={tmp_path}/largebatch.sqsh --container-mounts={root}:{root} --container-workdir={root}"
    apptainer = f"apptainer exec --nv --bind {root}:{root} --pwd {root} {tmp_path}/largebatch.sif"
    assert line.startswith(f"{srun} {pyxis if number == 3 else apptainer} {program} "), line
