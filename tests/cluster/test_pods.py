"""The scripts of mpi_scripts/kubernetes on hosts in place of pods: an ordinary user, port 2222, late workers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, Job

SCRIPTS = "mpi_scripts/kubernetes"
USER = 10001
READS = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # also root's own Python
BECOME = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", *READS]
OPTIONS = "--model vit_nano32 --model.img_size 64 --run.precision fp32 --log.to none --data.global_batch_size 8".split()
LIMIT_S = 400


class Pods:
    """h1 is the launcher, h2 and h3 are the workers of a job, whose key all of them have."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.home = hosts, hosts.folder / "home"
        keys = self.home / ".ssh"
        keys.mkdir(parents=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(keys / "id_rsa")], check=True)
        (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
        (self.home / "hostfile").write_text("h2 slots=1\nh3 slots=1\n")
        for path in (self.home, keys, *keys.iterdir()):
            os.chown(path, USER, USER)
        passwd = self.home / "passwd"
        passwd.write_text(f"{Path('/etc/passwd').read_text()}largebatch:x:{USER}:{USER}::{self.home}:/bin/bash\n")
        self.mounts = [hosts.run(name, ["mount", "--bind", str(passwd), "/etc/passwd"]) for name in hosts.names]
        assert all(code == 0 for code, _ in self.mounts), self.mounts

    def start(self, host: str, script: str, *options: str, **environment: str) -> Job:
        ours = {"HOME": str(self.home), "VENV": sys.prefix, "HOSTFILE": f"{self.home}/hostfile", "TMPDIR": "/dev/shm"}
        return self.hosts.start(host, [*BECOME, f"{SCRIPTS}/{script}", *options], environment=ours | environment)

    def launch(self, *options: str, **environment: str) -> Job:
        options = (*OPTIONS, "--data.micro_batch_size", "2", "--run.folder", str(self.home / "run"), *options)
        return self.start("h1", "launch.sh", *options, **environment)

    def worker(self, host: str) -> Job:
        job = self.start(host, "worker.sh")
        job.wait_for_line("Server listening on 0.0.0.0 port 2222.", LIMIT_S)
        return job

    def tell(self, host: str, script: str) -> None:
        """Tell a script to end, as Kubernetes tells the first process of a pod."""
        os.kill(min(pid for pid, line in self.hosts.processes(host).items() if script in line), signal.SIGTERM)


@pytest.fixture
def pods(hosts: Hosts) -> Iterator[Pods]:
    yield Pods(hosts)
    hosts.clear()
    for name in hosts.names:
        hosts.run(name, ["umount", "/etc/passwd"])
    subprocess.run(["rm", "-r", str(hosts.folder / "home")], check=True)


def test_a_worker_that_is_late_is_waited_for(pods):
    pods.worker("h2")
    job = pods.launch("--run.max_steps", "2")
    job.wait_for_line("launch.sh: waiting up to 600 s for ssh to h3", LIMIT_S)
    pods.worker("h3")
    code, output = job.wait(LIMIT_S)
    assert code == 0 and "8 = 2 ranks × 2 micro-batch × 2 passes" in output and "step 2 of" in output, output
    assert re.search(r"\bh2: rank 0\b", output) and re.search(r"\bh3: rank 1\b", output), output


def test_a_worker_that_never_answers_ends_the_job_in_one_sentence(pods):
    pods.worker("h2")
    code, output = pods.launch(WAIT_S="1").wait(LIMIT_S)
    assert code == 1
    told = "launch.sh: no answer to ssh in 1 s from h3: kubectl describe pod says why; WAIT_S allows more\n"
    assert re.sub("^launch.sh: waiting .*\n", "", output) == told


def test_a_host_that_is_not_of_this_job_is_no_worker(pods):
    """Its sshd has another key."""
    pods.worker("h2")
    other = pods.home / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(other)], check=True)
    (pods.home / "keys").mkdir()
    for name, source in (("id_rsa", other), ("authorized_keys", pods.home / ".ssh" / "authorized_keys")):
        (pods.home / "keys" / name).write_bytes(source.read_bytes())
        os.chown(pods.home / "keys" / name, USER, USER)
        (pods.home / "keys" / name).chmod(0o600)
    pods.start("h3", "worker.sh", KEYS=str(pods.home / "keys")).wait_for_line("Server listening", LIMIT_S)
    code, output = pods.launch("--run.max_steps", "1", WAIT_S="1").wait(LIMIT_S)
    assert code == 1 and "from h3:" in output, output


def test_a_run_whose_worker_is_told_to_end_goes_on_with_the_next_one(pods):
    """Exit code 75, with a checkpoint; the worker itself ends with 75, so that its pod is replaced."""
    pods.worker("h2")
    worker = pods.worker("h3")
    job = pods.launch("--run.max_steps", "1000")
    job.wait_for_line("step 1/", LIMIT_S)
    pods.tell("h3", "worker.sh")
    assert worker.wait(LIMIT_S)[0] == 75
    job.wait_for_line("launch.sh: the run was told to end; restart 1 of 20", LIMIT_S)
    pods.worker("h3")
    job.wait_for_line("resumed at step", LIMIT_S)
    pods.tell("h1", "launch.sh")
    code, output = job.wait(LIMIT_S)
    assert code == 75 and "restart 2" not in output, output
    assert "SIGUSR1 reached 1 of 2 ranks" in output, output


def test_a_mistake_is_not_started_again(pods):
    for host in ("h2", "h3"):
        pods.worker(host)
    code, output = pods.launch("--no-such-option").wait(LIMIT_S)
    assert code == 2 and "restart 1" not in output, output


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"WAIT_S": "soon"}, "WAIT_S is 'soon': expected whole seconds, e.g. 600"),
        ({"RESTARTS": "-1"}, "RESTARTS is '-1': expected a whole number, e.g. 20"),
        ({"HOSTFILE": "/none"}, "there is no /none that user largebatch may read: set HOSTFILE, or KEYS and fsGroup"),
        ({"HOSTFILE": "/dev/null"}, "/dev/null names no worker: expected a line such as 'a slots=8' for each"),
    ],
)
def test_a_setting_that_is_wrong_is_one_sentence(pods, change, sentence):
    assert pods.launch(**change).wait(LIMIT_S) == (1, f"launch.sh: {sentence}\n")
