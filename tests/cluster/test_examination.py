"""The doctor examines several real hosts with one fault each, and names the host or the pair of hosts.

Every run is the command that a user gives, on h1. Each fault is one that other programs meet as a hang.
"""

import re
import sys
from pathlib import Path

import pytest
from hosts import Hosts

ROOT = Path(__file__).parents[2]
DOCTOR = ["env", "-u", "PYTHONPATH", sys.executable, "-m", "largebatch.doctor"]  # with it, all hosts would use ours
NOWHERE = "02:00:00:00:00:99"  # a card that nobody has: what is sent there vanishes


def examine(hosts: Hosts, *options: str, names: str = "h1:1,h2:1,h3:1", limit_s: float = 60) -> tuple[int, str]:
    """Exit code and output of the doctor on h1; fails when it does not end."""
    command = [*DOCTOR, "--device", "cpu", "--hosts", names, *options]
    return hosts.run("h1", command, timeout_s=limit_s)


def failures(output: str) -> list[str]:
    """The causes of checks that failed, but for those that were not tried."""
    return [cause for cause in re.findall(r"^FAIL .*\n      cause: (.*)", output, re.M) if "not tried" not in cause]


def change(hosts: Hosts, host: str, *command: str) -> None:
    """Run a command on a host as root, at once."""
    code, output = hosts.run(host, list(command), timeout_s=10)
    assert code == 0, output


@pytest.fixture
def cut_pair(hosts):
    """A function that lets packets between two hosts vanish, in both directions; everything else goes on."""
    harmed = []

    def cut(first: str, second: str) -> None:
        for one, other in ((first, second), (second, first)):
            address = f"10.77.0.{other[1:]}"
            change(hosts, one, "ip", "neigh", "replace", address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
            harmed.append((one, address))

    yield cut
    for host, address in harmed:
        change(hosts, host, "ip", "neigh", "del", address, "dev", "eth0")


@pytest.fixture
def ssh_config(hosts):
    """A function that puts lines in front of the hosts' ssh_config."""
    file = hosts.folder / "ssh_config"
    before = file.read_text()
    yield lambda lines: file.write_text(lines + before)
    file.write_text(before)


# ---- sound hosts ---------------------------------------------------------------------------------


def test_sound_hosts_pass_every_check(hosts, tmp_path):
    (tmp_path / "images.tfrecord").write_text("some")
    code, output = examine(hosts, "--data", str(tmp_path), names="h1:2,h2:1,h3:1", limit_s=500)
    assert code == 0 and not failures(output), output
    for pair in ("h1 and h2", "h1 and h3", "h2 and h3"):
        assert re.search(rf"^ok    {pair}: \d+ us, \d+ MB/s$", output, re.M), output
    for name in ("small allreduce over 4 ranks: exact", "large allreduce over 4 ranks: exact", "10.77.0.0/24, eth0"):
        assert name in output
    for launch in ("mpirun", "horovodrun", "horovodrun --gloo"):
        assert f"ok    4-process allreduce, {launch}: the sum is exactly " in output, output


# ---- faults of one host --------------------------------------------------------------------------


def test_a_name_that_does_not_exist(hosts):
    code, output = examine(hosts, names="h1,h9")
    assert (code, failures(output)) == (1, ["the name h9 does not resolve"]), output
    assert "fix:   getent hosts h9" in output and "ok    h1: answers" in output


def test_no_sshd_listens(hosts, ssh_config):
    ssh_config("Host h3\n  Port 2222\n")
    code, output = examine(hosts)
    assert code == 1 and [cause[:24] for cause in failures(output)] == ["no sshd answers on h3 (s"], output


def test_a_host_behind_a_cut_cable(hosts):
    hosts.cut("h2")
    code, output = examine(hosts, "--limit-s", "6", limit_s=30)
    assert code == 1 and len(failures(output)) == 1 and "h2" in failures(output)[0], output
    assert "timed out" in output


def test_a_data_folder_that_one_host_does_not_see(hosts, tmp_path):
    (tmp_path / "images.tfrecord").write_text("some")
    change(hosts, "h3", "mount", "-t", "tmpfs", "none", str(tmp_path))
    try:
        code, output = examine(hosts, "--data", str(tmp_path))
    finally:
        change(hosts, "h3", "umount", str(tmp_path))
    seen = f"h3 and h1 see different files in {tmp_path}: h3 0 entries, h1 1"
    assert (code, failures(output)) == (1, [seen]), output


def test_a_data_folder_that_is_nowhere(hosts, tmp_path):
    code, output = examine(hosts, "--data", str(tmp_path / "gone"), names="h1,h2")
    assert code == 1
    assert failures(output) == [f"h1 does not see {tmp_path / 'gone'}: No such file or directory"], output


def test_another_package_version_on_one_host(hosts, ssh_config, tmp_path):
    old = tmp_path / "old" / "timm-0.4.12.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.4.12\n")
    sshd_config = hosts.folder / "h2.sshd_config"
    before = sshd_config.read_text()
    # sshd takes one SetEnv line alone
    sshd_config.write_text(re.sub(r"(SetEnv .*)", rf"\1 PYTHONPATH={tmp_path / 'old'}", before))
    try:
        reread(hosts, "h2")
        code, output = examine(hosts)
    finally:
        sshd_config.write_text(before)
        reread(hosts, "h2")
    assert code == 1 and failures(output)[0].startswith("h2 has timm 0.4.12, but h1 has timm "), output


def reread(hosts: Hosts, host: str) -> None:
    """Have a host's sshd read its configuration again; it is the first process there."""
    change(hosts, host, "kill", "-HUP", "1")
    hosts.wait_until_up(host)


def test_other_sources_on_one_host(hosts, tmp_path):
    """As after a forgotten copy: one file of ours differs on h3."""
    file = ROOT / "largebatch" / "schedules.py"
    other = tmp_path / "schedules.py"
    other.write_text(file.read_text() + "# older\n")
    change(hosts, "h3", "mount", "--bind", str(other), str(file))
    try:
        code, output = examine(hosts)
    finally:
        change(hosts, "h3", "umount", str(file))
    assert (code, failures(output)) == (1, ["largebatch/schedules.py differs between h3 and h1"]), output


def test_no_such_folder_on_one_host(hosts, tmp_path):
    """Started from a folder that is not shared; ranks would start in it."""
    work = tmp_path / "work"
    work.mkdir()
    change(hosts, "h2", "mount", "-t", "tmpfs", "none", str(tmp_path))
    command = f"cd {work} && PYTHONPATH={ROOT} {sys.executable} -m largebatch.doctor --hosts h1:1,h2:1"
    try:
        code, output = hosts.run("h1", ["sh", "-c", command], timeout_s=60)
    finally:
        change(hosts, "h2", "umount", str(tmp_path))
    assert (code, failures(output)) == (1, [f"there is no folder {work}"]), output


# ---- faults between two hosts --------------------------------------------------------------------


def test_a_pair_that_cannot_connect_is_named_within_its_limit(hosts, cut_pair):
    """mpirun starts all ranks, since h1 reaches both; a barrier would hang."""
    cut_pair("h2", "h3")
    code, output = examine(hosts, "--limit-s", "60", limit_s=120)
    assert code == 1
    assert failures(output) == ["h2 and h3: no message within 10 s (a firewall, or the wrong interface?)"], output
    assert "ok    h1 and h2: " in output and "ok    h1 and h3: " in output


def test_a_host_that_mpirun_does_not_reach_is_named(hosts, cut_pair, ssh_config):
    """Only ssh passes between h1 and h3, as through a firewall or a jump host: mpirun by itself hangs for minutes."""
    cut_pair("h1", "h3")
    ssh_config("Host h3\n  ProxyJump h2\n")
    code, output = examine(hosts, "--limit-s", "15", limit_s=90)
    assert code == 1 and len(failures(output)) == 1, output
    assert failures(output)[0].startswith("h1 and h3: nothing started within 15 s: "), output
    assert "ok    mpirun, h1 to h2: " in output


def test_a_small_mtu_on_the_way_is_told_from_a_cut(hosts):
    """Packets larger than the switch takes vanish: small messages pass, which is what makes it hard to find.

    Without segmentation by the card, as a switch sees them; h1's own packets stay small.
    """
    for host in ("h2", "h3"):
        change(hosts, host, *"ip link set eth0 mtu 9000 gso_max_segs 1".split())
    try:
        code, output = examine(hosts, "--limit-s", "60", limit_s=120)
    finally:
        for host in ("h2", "h3"):
            change(hosts, host, *"ip link set eth0 mtu 1500 gso_max_segs 65535".split())
    assert code == 1, output
    cause = "h2 and h3: small messages pass, but one of 1 MiB did not within 10 s (another MTU, or a bad cable?)"
    assert failures(output) == [cause], output


def test_a_slow_link_is_a_note_with_both_figures(hosts):
    """With one of three hosts slow, two of the three pairs are: they are measured against the third."""
    hosts.limit("h3", "40mbit")
    command = [*DOCTOR, "--device", "cpu", "--hosts", "h1:1,h2:1,h3:1"]
    job = hosts.start("h1", command)
    job.wait_for_line("small allreduce", 120)  # what follows needs no waiting for
    note = r"cause: (h\d and h\d) are far slower than other pairs: (.*); the faster pairs: (.*)"
    notes = re.findall(note, job.output)
    assert [pair for pair, _, _ in notes] == ["h1 and h3", "h2 and h3"], job.output
    slow, fast = (float(re.search(r"(\d+) MB/s", text)[1]) for text in notes[0][1:])
    assert slow < 7 and fast > 28, notes  # 40 Mbit/s are 5 MB/s, and the first 256 KB pass at once


# ---- the printed commands ------------------------------------------------------------------------


ENVIRONMENT = """
import os
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
here, interface = os.uname().nodename, os.environ.get("NCCL_SOCKET_IFNAME")
os.write(1, f"rank {rank} {here} {os.getcwd()} {interface} {'MY_SECRET' in os.environ}.\\n".encode())
"""
ALLREDUCE = """
import os
from mpi4py import MPI
comm = MPI.COMM_WORLD
os.write(1, f"rank {comm.rank} of {comm.size} on {os.uname().nodename}: {comm.allreduce(comm.rank)}.\\n".encode())
"""


def printed(hosts: Hosts, name: str, program: str, folder: Path) -> str:
    """The command that --print gives on h1, under this name, for four ranks of a program."""
    file = folder / "program.py"
    file.write_text(program)
    arguments = ["-m", "largebatch.doctor", "--print", "-np", "4", "-H", "h1:2,h2:2", "--", sys.executable, str(file)]
    code, output = hosts.run("h1", [sys.executable, *arguments], timeout_s=30)
    assert code == 0, output
    return dict(re.findall(r"^# (.*)\n(.+)$", output, re.M))[name]


@pytest.mark.parametrize("name", ["mpirun", "horovodrun", "horovodrun --gloo"])
def test_a_printed_command_runs_as_it_stands(hosts, name, tmp_path):
    """The ranks of a host lie together, in this folder; only what was asked for travels to the other host.

    Horovod's own launcher hands on the whole environment, and the ranks on h1 inherit it, as any child does.
    """
    command = printed(hosts, name, ENVIRONMENT, tmp_path)
    code, output = hosts.run("h1", ["sh", "-c", command], timeout_s=120, environment={"MY_SECRET": "1"})
    assert code == 0, output
    found = sorted(re.findall(r"rank (\d) (h\d) (\S+) (\S+) (\w+)\.", output))
    assert [rank[:3] for rank in found] == [(str(rank), f"h{1 + rank // 2}", str(ROOT)) for rank in range(4)], output
    if name == "mpirun":
        assert [rank[3:] for rank in found] == [("=eth0", "True")] * 2 + [("=eth0", "False")] * 2, output


def sums(output: str) -> list[tuple[str, ...]]:
    """(rank, size, host, sum) of each rank of ALLREDUCE."""
    return sorted(re.findall(r"rank (\d) of (\d) on (h\d): (\d)\.", output))


IN_ORDER = [("0", "4", "h1", "6"), ("1", "4", "h1", "6"), ("2", "4", "h2", "6"), ("3", "4", "h2", "6")]


def test_the_printed_srun_command_runs_as_it_stands(hosts, slurm, tmp_path):
    command = printed(hosts, "srun", ALLREDUCE, tmp_path)
    code, output = slurm.run(["sh", "-c", command], timeout_s=90)
    assert code == 0 and sums(output) == IN_ORDER, output


def test_the_printed_sbatch_command_runs_as_it_stands(hosts, slurm, tmp_path):
    command = printed(hosts, "sbatch", ALLREDUCE, tmp_path)
    code, output = slurm.run(["sh", "-c", f"cd {tmp_path} && {command}"], timeout_s=30)
    assert code == 0, output
    job = re.search(r"Submitted batch job (\d+)", output)[1]
    slurm.wait_for_state(job, "COMPLETED", "FAILED", timeout_s=120)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert sums(output) == IN_ORDER, output
