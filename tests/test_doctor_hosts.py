"""What the doctor says about several hosts: hosts as text, answers compared, the commands; on one machine.

Clocks cannot be set apart on one machine, so they are compared here, by a table; real hosts with real faults are in
tests/cluster. Two names of this machine stand for two hosts where commands are run: an ssh that stays here.
"""

import os
import re
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from largebatch.doctor import __main__ as command_line
from largebatch.doctor import commands, exchange, hosts, network
from largebatch.doctor.commands import Mpi
from largebatch.doctor.hosts import Answer, Host, Network

ROOT = Path(__file__).parents[1]
OPEN_MPI_4 = Mpi("Open MPI", 4, "/opt/mpi/bin/mpirun")
OPEN_MPI_5 = Mpi("Open MPI", 5, "/opt/mpi/bin/mpirun")
MPICH = Mpi("MPICH", 5, "/opt/mpi/bin/mpirun")
TWO = (Host("a", 2), Host("b", 2))
ETH = Network("10.0.0.0/24", {"a": "eth0", "b": "eth0"})


def card(name: str, address: str, speed: int = 0) -> list:
    """A network interface as the probe tells it."""
    return [name, f"{address}/255.255.255.0", speed]


def answer(name: str, *, interfaces: list | None = None, ahead_s: float = 0.0, bound_s: float = 0.001, **facts):
    """A host that said nothing unusual but what is given."""
    number = ord(name) - ord("a") + 1
    usual = {
        "hostname": name,
        "address": f"10.0.0.{number}",
        "interfaces": interfaces or [["lo", "127.0.0.1/255.0.0.0", 0], card("eth0", f"10.0.0.{number}", 1000)],
        "packages": {"Python": "3.11.7", "torch": "2.13.0"},
        "sources": {"largebatch/engine.py": 1, "zoo/vit.py": 2},
        "launcher": True,
        "data": {"count": 3, "listing": 7, "times": 8},
    }
    return Answer(Host(name), usual | facts, ahead_s=ahead_s, bound_s=bound_s)


def failed(result, cause: str) -> None:
    assert not result.ok and cause in result.cause and result.fix and "\n" not in result.cause + result.fix, result


# -- what is given ---------------------------------------------------------------------------------------------


def test_hosts_with_and_without_a_number():
    assert hosts.parse_hosts("a:2,b, node-3.cluster:16") == (Host("a", 2), Host("b", 1), Host("node-3.cluster", 16))


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("a:2,,b", "--hosts a:2,,b: '' is not a host; write name:ranks, as in a:2,b:2"),
        ("a:two", "'a:two' is not a host"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("a;reboot", "'a;reboot' is not a host"),
        ("a:0", "a has no rank; leave it out or give it one, as in a:1"),
        ("a:1,b,a:2", "a is listed twice; list it once, with all its ranks"),
    ],
)
def test_what_is_no_host(text, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        hosts.parse_hosts(text)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--print"], "--print needs hosts; name them, as in --hosts a:2,b:2"),
        (["--data", "."], "--data needs hosts"),
        (["--hosts", "a:2", "-np", "2"], "-np has an effect only with --print"),
        (["--hosts", "a:2", "--", "python", "x.py"], "python x.py has an effect only with --print"),
        (["--hosts", "a:2", "--print", "--data", "."], "--data has no effect with --print"),
        (["--hosts", "a:2", "--print", "-np", "-1"], "-np and --limit-s must be more than 0"),
        (["--hosts", "a:2", "--limit-s", "0"], "-np and --limit-s must be more than 0"),
        (["--hosts", "a:x"], "'a:x' is not a host"),
    ],
)
def test_options_that_mean_nothing(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as error:
        command_line.main(arguments)
    assert error.value.code == 2 and sentence in capsys.readouterr().err


def test_more_ranks_than_the_hosts_have(capsys):
    assert command_line.main(["--print", "-np", "5", "-H", "a:2,b:2"]) == 2
    assert "-np 5 is more than the 4 ranks of the hosts" in capsys.readouterr().err


# -- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent, theirs, received, ahead_s, bound_s",
    [
        (100.0, 100.5, 101.0, 0.0, 0.5),  # in the middle of the round trip
        (100.0, 104.5, 101.0, 4.0, 0.5),
        (100.0, 96.0, 100.2, -4.1, 0.1),
        (100.0, 101.0, 101.0, 0.5, 0.5),  # all of the way there: off by the whole bound, and no more
    ],
)
def test_skew_is_measured_against_half_the_round_trip(sent, theirs, received, ahead_s, bound_s):
    assert hosts.skew(sent, theirs, received) == pytest.approx((ahead_s, bound_s))


@pytest.mark.parametrize(
    "ahead_s, bound_s, ok",
    [(0.2, 0.001, True), (1.5, 0.001, False), (-1.5, 0.001, False), (1.5, 0.6, True), (-3600.0, 2.0, False)],
)
def test_a_clock_is_wrong_when_it_surely_is(ahead_s, bound_s, ok):
    result = hosts.check_clocks([answer("a"), answer("b", ahead_s=ahead_s, bound_s=bound_s)])
    assert result.ok == ok
    if not ok:
        way = "ahead of" if ahead_s > 0 else "behind"
        failed(result, f"the clock of b is {abs(ahead_s):.3g} s {way} this machine's, give or take {bound_s:g} s")
        assert "ssh b " in result.fix


def test_the_odd_one_is_who_differs_from_most():
    old = answer("a", packages={"Python": "3.11.7", "torch": "2.12.0"})
    failed(hosts.check_packages([old, answer("b"), answer("c")]), "a has torch 2.12.0, but b has torch 2.13.0")
    gone = answer("c", packages={"Python": "3.11.7", "torch": None})
    failed(hosts.check_packages([answer("a"), answer("b"), gone]), "c has no torch, but a has torch 2.13.0")


def test_sources_name_the_file():
    other = answer("b", sources={"largebatch/engine.py": 1, "zoo/vit.py": 3})
    failed(hosts.check_sources([answer("a"), other]), "zoo/vit.py differs between b and a")
    missing = answer("b", sources={"zoo/vit.py": 2})
    failed(hosts.check_sources([answer("a"), missing]), "largebatch/engine.py differs between b and a")


def test_a_copy_of_the_data_is_a_note():
    result = hosts.check_data([answer("a"), answer("b", data={"count": 3, "listing": 7, "times": 9})], "/data")
    assert result.ok and "their times differ on b: is it a copy?" in result.cause


def test_an_own_name_that_is_loopback_is_a_note():
    """As Debian writes it: MPI works, Gloo tells the others to connect to themselves."""
    result = hosts.check_names([answer("a"), answer("b", address="127.0.1.1")])
    assert result.ok and "resolves its own name, b, to 127.0.1.1" in result.cause and "10.0.0.2 b" in result.fix
    failed(hosts.check_names([answer("a"), answer("b", address="")]), "b cannot resolve its own name, b")


ON_A = {"docker0": "172.17.0.1", "usb0": "10.9.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
ON_B = {"docker0": "172.17.0.2", "usb0": "10.9.0.1", "eth0": "10.0.0.2", "ib0": "10.1.0.2", "ens3": "10.0.0.2"}


@pytest.mark.parametrize(
    "of_a, of_b, speeds, chosen",
    [
        (["docker0", "eth0"], ["docker0", "eth0"], {"docker0": 10000}, "eth0"),  # docker's leads nowhere
        (["usb0", "eth0"], ["usb0", "eth0"], {"usb0": 480}, "eth0"),  # the same address on both: no network between
        (["eth0", "ib0"], ["eth0", "ib0"], {"eth0": 1000, "ib0": 100000}, "ib0"),  # the faster; names are in the other
        (["ib0", "eth0"], ["ib0", "eth0"], {}, "eth0"),  # as fast: the one that names are in
        (["eth0"], ["ens3"], {}, "10.0.0.0/24"),  # other names on each host
        (["eth0"], ["ib0"], {}, None),
    ],
)
def test_the_network_that_is_chosen(of_a, of_b, speeds, chosen):
    cards_a = [card(name, ON_A[name], speeds.get(name, 0)) for name in of_a]
    cards_b = [card(name, ON_B[name], speeds.get(name, 0)) for name in of_b]
    found = hosts.choose_network([answer("a", interfaces=cards_a), answer("b", interfaces=cards_b)])
    assert (found and found.selector) == chosen


def test_no_common_network_is_a_note():
    result = hosts.check_network([answer("a"), answer("b", interfaces=[card("eth0", "10.0.1.1")])])
    assert result.ok and "a is in 10.0.0.0/24, b is in 10.0.1.0/24" in result.cause


@pytest.mark.parametrize(
    "code, errors, last, cause, fix",
    [
        (255, "ssh: Could not resolve hostname b: x", "", "the name b does not resolve", "getent hosts b"),
        (255, "ssh: connect to host b port 22: Connection refused", "", "no sshd answers on b", "start ssh"),
        (255, "ssh: connect to host b port 22: Connection timed out", "", "b cannot be reached", "ping -c 3 b"),
        (255, "Host key verification failed.", "", "the key of b is not known", "ssh-keyscan b"),
        (255, "root@b: Permission denied (publickey).", "", "ssh to b asks for a password", "ssh-copy-id b"),
        (255, "kex_exchange: something new", "", "ssh fails: kex_exchange: something new", "ssh -v b true"),
        (91, "", "", "there is no folder ", "ls -d"),
        (92, "", "", "there is no " + sys.executable, "install.sh"),
        (None, "", "", "no answer within 5 s: ssh has not connected", "ssh -v b true"),
        (None, "", "the folder /data", "no answer within 5 s: it stopped at the folder /data", "ssh b ls"),
        (1, "MemoryError", "", "ended with exit code 1: MemoryError", "ssh b"),
    ],
)
def test_why_a_host_does_not_answer(code, errors, last, cause, fix):
    found = hosts.explain(Host("b"), code, errors, last, limit_s=5)
    assert cause in found[0] and fix in found[1]


def test_other_hosts_and_no_ssh_are_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line.main(["--hosts", "localhost:2,n1:2,n2:2"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  ssh client",
        "      cause: there is no ssh client on this host to reach n1, n2",
        "      fix:   sudo apt-get install openssh-client",
        "1 check failed",
    ]
    assert hosts.check_ssh((Host("localhost", 2),)).ok


def test_this_machine_answers_without_ssh(tmp_path):
    (tmp_path / "file").write_text("x")
    found = hosts.ask(
        Host("localhost"), {"packages": ["torch", "no-such"], "data": str(tmp_path), "launcher": ""}, limit_s=60
    )
    assert found.facts, found.cause
    assert found.facts["packages"]["torch"] and found.facts["packages"]["no-such"] is None
    assert found.facts["data"]["count"] == 1 and "largebatch/doctor/hosts.py" in found.facts["sources"]
    assert abs(found.ahead_s) <= found.bound_s + 0.05 and "lo" in [interface.name for interface in found.interfaces]


def test_another_host_is_asked_in_one_line(tmp_path, monkeypatch):
    """Its login shell may be csh, which takes no line breaks inside of quotes."""
    (tmp_path / "a b!").mkdir()
    monkeypatch.chdir(tmp_path / "a b!")
    told = tmp_path / "command"
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nfor last; do :; done\nprintf %s "$last" >{told}\nexec sh -c "$last"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    wanted = {"packages": ["torch"], "data": "a 'quoted' \n folder!", "launcher": ""}
    found = hosts.ask(Host("elsewhere"), wanted, limit_s=60)
    assert found.facts and found.facts["packages"]["torch"], found.cause
    assert "\n" not in told.read_text() and told.read_text().startswith("exec sh -c ")


def test_pairs_far_slower_than_others_are_notes():
    found = {"a and b": (1e-5, 8e8), "a and c": (1e-5, 9e8), "b and c": (1.2e-5, 1e8), "a and d": (9e-3, 8e8)}
    pairs = {pair: {"latency_s": late, "bytes_per_s": rate} for pair, (late, rate) in found.items()}
    notes = list(network.compare(pairs))
    assert [note.name for note in notes] == ["b and c", "a and d"] and all(note.ok for note in notes)
    assert "12 us, 100 MB/s; the faster pairs: 10 us, 900 MB/s" in notes[0].cause


# -- commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http", ("Open MPI", 4)),
        ("mpirun (Open MPI) 5.0.8\n\nReport bugs to https", ("Open MPI", 5)),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", ("MPICH", 5)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005", ("Intel MPI", 2021)),
    ],
)
def test_which_mpi_it_is(text, expected):
    assert commands.recognise(text) == expected


def test_an_mpi_that_is_not_known():
    with pytest.raises(ValueError, match="mpirun --version says 'MVAPICH 9', which is not Open MPI"):
        commands.recognise("MVAPICH 9\n")


def test_open_mpi_5_names_its_daemons_settings_differently():
    four = commands.mpirun(OPEN_MPI_4, TWO, 4, ["x"], network=ETH)
    five = commands.mpirun(OPEN_MPI_5, TWO, 4, ["x"], network=ETH)
    for words, command in (
        ("--mca oob_tcp_if_include eth0", four),
        ("--mca oob_tcp_keepalive_time 10", four),
        ("--mca plm_rsh_args", four),
        ("--prtemca prte_if_include eth0", five),
        ("--prtemca oob_tcp_keepalive_time 10", five),
        ("--prtemca plm_ssh_args", five),
        ("--mca btl_tcp_if_include eth0", four),
        ("--mca btl_tcp_if_include eth0", five),
    ):
        assert words in " ".join(command)


def test_the_transport_is_that_of_the_training():
    """mpi_scripts/train_multinode.sh names none, so MPI may take UCX."""
    words = commands.mpirun(OPEN_MPI_4, TWO, 4, ["x"], network=ETH)
    assert not {"pml", "btl"} & {*words}


def test_mpich_gets_its_own_options():
    command = commands.mpirun(MPICH, TWO, 4, ["x"], network=ETH)
    assert "-mca" not in " ".join(command) and "-hosts a:2,b:2 -bind-to none -iface eth0" in " ".join(command)
    assert command[:2] == ["env", f"HYDRA_LAUNCHER_EXTRA_ARGS={commands.SSH_OPTIONS}"] and command[-1] == "x"


def test_only_what_ranks_need_travels(monkeypatch):
    for name in ("MY_SECRET", "HOROVOD_CYCLE_TIME", "HOROVOD_RANK", "NCCL_DEBUG", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    command = commands.mpirun(OPEN_MPI_4, TWO, 4, [], network=ETH)
    passed = {command[i + 1].partition("=")[0] for i, word in enumerate(command) if word == "-x"}
    assert {"HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME"} <= passed
    assert not {"MY_SECRET", "HOROVOD_RANK", "PATH", "HOME"} & passed


def test_the_same_variables_travel_with_the_scripts(monkeypatch):
    """env.sh hands on those of Horovod and NCCL as well, each once, and never a rank's place."""
    names = ("MY_SECRET", "HOROVOD_CYCLE_TIME", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "NCCL_ALGO", "CHOSEN")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRAVEL", "CHOSEN HOROVOD_CYCLE_TIME")
    monkeypatch.setenv("VENV", sys.prefix)
    script = f". {ROOT}/mpi_scripts/env.sh; printf '%s\\n' \"${{MPIRUN[@]}}\""
    words = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.split()
    passed = [words[i + 1] for i, word in enumerate(words) if word == "-x"]
    assert {"HOROVOD_CYCLE_TIME", "NCCL_ALGO", "NCCL_DEBUG", "CHOSEN", "VENV"} <= {*passed}
    assert not {"MY_SECRET", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE"} & {*passed} and len(passed) == len({*passed})


def test_keepalives_are_those_that_the_installation_sets():
    """One place says after how many seconds a host is lost: install.sh."""
    text = (ROOT / "mpi_scripts" / "install.sh").read_text()
    assert f"KEEPALIVES=({' '.join(f'{name}={value}' for name, value in commands.KEEPALIVES.items())})" in text
    assert f'SSH_KEEPALIVE="{commands.SSH_OPTIONS}"' in text


def test_the_srun_of_the_doctor_ends_and_gathers_as_that_of_the_script():
    text = (ROOT / "mpi_scripts" / "train_slurm.sbatch").read_text()
    line = " ".join(commands.srun(TWO, 4, ["x"], network=ETH))
    assert "--wait=300" in line and "--wait=${SLURM_WAIT:-300}" in text
    assert "SLURM_PMIX_FENCE=tree" in line and "SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-tree}" in text


def test_slurm_takes_ranks_per_node_only_where_that_is_one_number():
    assert "--ntasks-per-node=2" in commands.srun(TWO, 4, ["x"], network=ETH)
    uneven = commands.sbatch(OPEN_MPI_4, (Host("a", 2), Host("b", 1)), 3, ["x"], network=ETH)
    assert "--ntasks=3" in uneven and "--ntasks-per-node" not in " ".join(uneven)
    inner = shlex.split(uneven[-1].removeprefix("--wrap="))
    assert inner[0] == OPEN_MPI_4.launcher and "-H" not in inner and "plm_rsh_args" not in inner


PROGRAM = """
import os
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
os.write(1, f"rank {rank} {os.uname().nodename}.\\n".encode())
"""

SSH = """#!/bin/sh
# drops options before and after the host, and runs the command here under the host's name, with a login's environment
h=
while [ $# -gt 0 ]; do
    case "$1" in -o|-p|-i|-l|-F) shift 2 ;; -*) shift ;; *) [ -n "$h" ] && break; h=$1; shift ;; esac
done
exec unshare --uts env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "hostname $h; $*"
"""


@pytest.fixture
def two_names(tmp_path, monkeypatch):
    """n1 and n2 are this machine: ssh to them stays here, under their name."""
    tried = subprocess.run(["unshare", "--uts", "hostname", "n1"], capture_output=True, text=True, timeout=10)
    if tried.returncode:
        pytest.skip(f"no host names of one's own here ({tried.stderr.strip()}): run it as root")
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_the_printed_mpirun_command_runs_on_two_hosts(two_names, capfd):
    """Names that do not resolve here: the interfaces that lead nowhere are left out, instead of one chosen."""
    arguments = ["--print", "-np", "4", "-H", "n1:2,n2:2", "--", sys.executable, "-c", PROGRAM]
    assert command_line.main(arguments) == 0
    printed = dict(re.findall(r"^# (\S.*)\n((?:.+\n)+?)(?=\n|\Z)", capfd.readouterr().out, re.M))
    assert set(printed) >= {"mpirun", "horovodrun", "horovodrun --gloo", "srun", "sbatch"}
    done = subprocess.run(["sh", "-c", printed["mpirun"]], capture_output=True, text=True, timeout=60, cwd=ROOT)
    found = sorted(re.findall(r"rank (\d) (n\d)\.", done.stdout))
    assert found == [("0", "n1"), ("1", "n1"), ("2", "n2"), ("3", "n2")], done.stdout + done.stderr


@pytest.mark.parametrize("name", ["localhost", socket.gethostname()])
def test_horovodrun_starts_the_ranks_of_this_host_alone(name):
    """With --network-interfaces it finds none for 127.0.0.1."""
    here, lan = (Host(name, 2),), Network("192.0.2.0/24", {name: "eth0"})
    program = [sys.executable, "-c", "import horovod.torch as hvd; hvd.init(); print(f'rank {hvd.rank()}.')"]
    for command in (
        commands.horovodrun(commands.detect_mpi(), here, 2, program, network=lan),
        commands.horovodrun_gloo(here, 2, program, network=lan),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert sorted(re.findall(r"rank (\d)\.", done.stdout)) == ["0", "1"], done.stdout + done.stderr
    assert "--network-interfaces" in commands.horovodrun_gloo((*here, Host("n2")), 3, program, network=lan)


# -- what the ranks run ----------------------------------------------------------------------------------------


def test_a_message_that_never_comes_ends_with_its_limit():
    class Never:
        def Test(self) -> bool:
            return False

    with pytest.raises(TimeoutError):
        exchange.finish(Never(), 0.0)


def test_launches_at_the_same_time_share_no_folder(tmp_path, monkeypatch):
    """In a folder that all use, an mpirun that ends may remove what another one is about to use."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nmkdir "$TMPDIR/ompi" && echo "$TMPDIR" >> {tmp_path}/used && echo started\n')
    mpirun.chmod(0o755)
    cluster = network.Cluster(Mpi("Open MPI", 4, str(mpirun)), (Host("n1"), Host("n2"), Host("n3")), None, "here", {})
    assert all(result.ok for result in network.check_starts(cluster, limit_s=60))
    used = {Path(line) for line in (tmp_path / "used").read_text().splitlines()}
    assert len(used) == 3 and not any(folder.exists() for folder in used)


def test_pairs_and_sums_on_this_machine(two_names):
    """Real ranks, one per name: every pair in turn, and exact sums over all."""
    mpi = commands.detect_mpi()
    loopback = Network("127.0.0.0/8", {"n1": "lo", "n2": "lo", "n3": "lo"})
    cluster = network.Cluster(mpi, (Host("n1"), Host("n2"), Host("n3")), loopback, "here", {})
    results = [*network.check_starts(cluster, limit_s=60), *network.check_pairs(cluster, limit_s=60)]
    results += network.check_sums(cluster, limit_s=60)
    assert all(result.ok for result in results), results
    names = [result.name for result in results if not result.cause]
    assert names == [
        *[f"mpirun, here to n{number}" for number in (1, 2, 3)],
        *["n1 and n2", "n1 and n3", "n2 and n3"],
        *["small allreduce over 3 ranks", "large allreduce over 3 ranks"],
    ]
