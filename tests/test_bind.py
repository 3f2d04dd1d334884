"""bind.sh on the files of a machine shaped like a DGX A100, and on this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.launch import bind
from largebatch.launch.bind import LOCAL_RANK, Binding, Machine, local_rank, numbers, plan, ranges, share, visible_gpus
from largebatch.launch.launcher import LAUNCHERS

ROOT = Path(__file__).parents[1]
BIND = str(ROOT / "mpi_scripts" / "bind.sh")
ENVIRONMENT = {"PATH": os.environ["PATH"], "VENV": sys.prefix}

# GPUs and adapters with their NUMA nodes and the PCI bridges above them, written by hand in the shape of a DGX A100:
# two GPUs and two adapters behind one port; mlx5_4, 5, 10 and 11 are for storage. The first group follows what NCCL
# printed on such a machine (NVIDIA/nccl, issue 1505); addresses of the others, and of most bridges, are made up.
GPUS = {
    "0000:07:00.0": (3, "pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:00.0"),
    "0000:0f:00.0": (3, "pci0000:00/0000:00:01.1/0000:01:00.0/0000:0a:00.0/0000:0d:00.0"),
    "0000:47:00.0": (1, "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0"),
    "0000:4e:00.0": (1, "pci0000:40/0000:40:01.1/0000:41:00.0/0000:4a:00.0/0000:4d:00.0"),
    "0000:87:00.0": (7, "pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:00.0"),
    "0000:90:00.0": (7, "pci0000:80/0000:80:01.1/0000:81:00.0/0000:8a:00.0/0000:8e:00.0"),
    "0000:b7:00.0": (5, "pci0000:b0/0000:b0:01.1/0000:b1:00.0/0000:b2:00.0"),
    "0000:bd:00.0": (5, "pci0000:b0/0000:b0:01.1/0000:b1:00.0/0000:b8:00.0/0000:bb:00.0"),
}
ADAPTERS = {
    "mlx5_0": (3, "pci0000:00/0000:00:01.1/0000:01:00.0/0000:0a:00.0/0000:0c:00.0"),
    "mlx5_1": (3, "pci0000:00/0000:00:01.1/0000:01:00.0/0000:10:00.0/0000:12:00.0"),
    "mlx5_2": (1, "pci0000:40/0000:40:01.1/0000:41:00.0/0000:4a:00.0/0000:4b:00.0"),
    "mlx5_3": (1, "pci0000:40/0000:40:01.1/0000:41:00.0/0000:50:00.0/0000:54:00.0"),
    "mlx5_4": (0, "pci0000:60/0000:60:03.1/0000:61:00.0"),
    "mlx5_5": (0, "pci0000:60/0000:60:03.1/0000:61:00.1"),
    "mlx5_6": (7, "pci0000:80/0000:80:01.1/0000:81:00.0/0000:8a:00.0/0000:8d:00.0"),
    "mlx5_7": (7, "pci0000:80/0000:80:01.1/0000:81:00.0/0000:91:00.0/0000:94:00.0"),
    "mlx5_8": (5, "pci0000:b0/0000:b0:01.1/0000:b1:00.0/0000:b8:00.0/0000:ba:00.0"),
    "mlx5_9": (5, "pci0000:b0/0000:b0:01.1/0000:b1:00.0/0000:c8:00.0/0000:cc:00.0"),
    "mlx5_10": (4, "pci0000:e0/0000:e0:03.1/0000:e1:00.0"),
    "mlx5_11": (4, "pci0000:e0/0000:e0:03.1/0000:e1:00.1"),
}
ANSWER = "".join(f"{k}, 0000{bus.upper()}, GPU-{k}a5f6c1e\n" for k, bus in enumerate(GPUS))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture(scope="module")
def dgx(tmp_path_factory) -> Path:
    """Write the /sys of a DGX: 8 nodes of 16 cores, each core with two hyperthreads, k and k + 128."""
    sys_folder = tmp_path_factory.mktemp("sys")
    for node in range(8):
        first = 16 * node
        cpus = f"{first}-{first + 15},{first + 128}-{first + 143}"
        write(sys_folder / f"devices/system/node/node{node}/cpulist", cpus)
    write(sys_folder / "devices/system/cpu/online", "0-255")
    for cpu in range(256):
        siblings = f"{cpu % 128},{cpu % 128 + 128}"
        write(sys_folder / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    (sys_folder / "bus/pci/devices").mkdir(parents=True)
    write(sys_folder / "bus/pci/drivers/nvidia/new_id", "")
    for bus, (node, bridges) in GPUS.items():
        write(sys_folder / "devices" / bridges / bus / "numa_node", str(node))
        (sys_folder / "bus/pci/devices" / bus).symlink_to(sys_folder / "devices" / bridges / bus)
        write(sys_folder / "bus/pci/drivers/nvidia" / bus / "vendor", "0x10de")
    for name, (node, place) in ADAPTERS.items():
        write(sys_folder / "devices" / place / "numa_node", str(node))
        write(sys_folder / "class/infiniband" / name / "ports/1/state", "4: ACTIVE")
        (sys_folder / "class/infiniband" / name / "device").symlink_to(sys_folder / "devices" / place)
    write(sys_folder / "gpus.csv", ANSWER.strip())
    return sys_folder


def run_bind(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run bind.sh with no other variables than these; return its exit code and its output."""
    done = subprocess.run(
        [BIND, *arguments],
        env=ENVIRONMENT | environment,
        text=True,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


EXPECTED = [
    "GPU 0 at 0000:07:00.0, NUMA node 3; CPUs 48-55,176-183; memory of node 3; adapter mlx5_0:1",
    "GPU 1 at 0000:0f:00.0, NUMA node 3; CPUs 56-63,184-191; memory of node 3; adapter mlx5_1:1",
    "GPU 2 at 0000:47:00.0, NUMA node 1; CPUs 16-23,144-151; memory of node 1; adapter mlx5_2:1",
    "GPU 3 at 0000:4e:00.0, NUMA node 1; CPUs 24-31,152-159; memory of node 1; adapter mlx5_3:1",
    "GPU 4 at 0000:87:00.0, NUMA node 7; CPUs 112-119,240-247; memory of node 7; adapter mlx5_6:1",
    "GPU 5 at 0000:90:00.0, NUMA node 7; CPUs 120-127,248-255; memory of node 7; adapter mlx5_7:1",
    "GPU 6 at 0000:b7:00.0, NUMA node 5; CPUs 80-87,208-215; memory of node 5; adapter mlx5_8:1",
    "GPU 7 at 0000:bd:00.0, NUMA node 5; CPUs 88-95,216-223; memory of node 5; adapter mlx5_9:1",
]


def test_every_rank_of_a_dgx_is_near_its_gpu(dgx):
    """Storage adapters are given to no rank, and hyperthreads stay together."""
    for rank, line in enumerate(EXPECTED):
        ranks = {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
        code, output = run_bind("--dry-run", "false", SYSFS=str(dgx), GPUS=str(dgx / "gpus.csv"), **ranks)
        assert code == 0
        assert output.endswith(f"local rank {rank} of 8: {line}\n")


def test_a_rank_that_sees_one_gpu_is_near_it(dgx):
    """As with Slurm's --gpus-per-task=1: nvidia-smi lists one GPU, the others of the host are in /sys."""
    answers = ANSWER.splitlines(keepends=True)
    for rank, gpu in enumerate([5, 0, 7, 6, 2, 1, 4, 3]):
        (dgx / "one.csv").write_text(answers[gpu].replace(f"{gpu},", "0,", 1))
        ranks = {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
        given = {"SYSFS": str(dgx), "GPUS": str(dgx / "one.csv"), "CUDA_VISIBLE_DEVICES": "0"}
        assert run_bind("--dry-run", **given, **ranks)[1].endswith(f"local rank {rank} of 8: {EXPECTED[gpu]}\n")


def test_fewer_ranks_than_gpus_of_which_each_sees_one(dgx):
    """Two ranks have GPUs of one NUMA node; the cores near GPUs of other jobs stay free."""
    found = [plan(machine(dgx, answer=ANSWER.splitlines()[gpu]), rank, 2) for rank, gpu in enumerate([3, 2])]
    assert [ranges(each.cpus) for each in found] == ["24-31,152-159", "16-23,144-151"]
    few = [plan(machine(dgx, "16-19", ANSWER.splitlines()[gpu]), rank, 2) for rank, gpu in enumerate([3, 2])]
    assert [ranges(each.cpus) for each in few] == ["16-17", "18-19"]  # other jobs have the other cores


def test_a_rank_that_sees_one_gpu_of_a_host_that_hides_the_others(tmp_path):
    """They share the cores by their numbers; a GPU that two ranks really share is refused by the training."""
    write(tmp_path / "bus/pci/devices/0000:07:00.0/numa_node", "0")
    write(tmp_path / "devices/system/node/node0/cpulist", "0-3")
    found = [plan(machine(tmp_path, "0-3", ANSWER.splitlines()[0]), rank, 2) for rank in range(2)]
    assert [each.cpus for each in found] == [[0, 1], [2, 3]]
    assert [each.gpu for each in found] == [f"GPU {rank} at 0000:07:00.0, NUMA node 0" for rank in range(2)]


def machine(sysfs: Path, cpus: str = "0-255", answer: str = ANSWER, visible: str | None = None) -> Machine:
    return Machine(sysfs, frozenset(numbers(cpus)), visible_gpus(answer, visible))


def test_one_rank_per_node_has_all_its_cores(dgx):
    found = [plan(machine(dgx, visible="6,0"), rank, 2) for rank in range(2)]
    assert [ranges(each.cpus) for each in found] == ["80-95,208-223", "48-63,176-191"]
    assert [each.adapter for each in found] == ["mlx5_8:1", "mlx5_0:1"]


def test_only_allowed_cpus_are_given(dgx):
    """A job that owns half of the machine has no core near GPUs 4 to 7, so all ranks share its cores."""
    for rank, cpus in enumerate(["48-51", "52-55"]):
        assert ranges(plan(machine(dgx, "48-55"), rank, 2).cpus) == cpus
    found = [plan(machine(dgx, "0-63"), rank, 8) for rank in range(8)]
    assert [ranges(each.cpus) for each in found] == [f"{8 * k}-{8 * k + 7}" for k in range(8)]
    assert found[2].node == 1 and found[2].notes == ["too few cores near the GPUs, so the ranks share all 64 cores"]


def test_a_machine_that_does_not_tell_its_nodes(tmp_path):
    write(tmp_path / "bus/pci/devices/0000:07:00.0/numa_node", "-1")
    found = plan(machine(tmp_path, "0-3", ANSWER.splitlines()[0]), 0, 1)
    assert found.cpus == [0, 1, 2, 3] and found.node == -1 and not found.adapter
    assert found.notes == ["no NUMA node known, so the ranks share all 4 cores"]


def test_ranks_without_gpus(dgx):
    found = [plan(machine(dgx, answer=""), rank, 8) for rank in range(8)]
    assert sorted(cpu for each in found for cpu in each.cpus) == list(range(256))
    assert [each.node for each in found] == list(range(8))
    assert plan(machine(dgx, "0-2", answer=""), 0, 4).notes == ["not bound: 3 cores for 4 ranks"]
    assert plan(machine(dgx, "0-2", answer=""), 0, 4).cpus == []


def test_an_adapter_that_is_down_is_not_taken(dgx):
    state = dgx / "class/infiniband/mlx5_0/ports/1/state"
    state.write_text("1: DOWN\n")
    found = [plan(machine(dgx), rank, 2) for rank in range(2)]
    assert [each.adapter for each in found] == ["mlx5_1:1"] * 2
    state.write_text("4: ACTIVE\n")


def test_the_parts_are_whole_cores_and_everything(dgx):
    cores = machine(dgx).cores(frozenset(range(256)))
    for parts in (1, 3, 7, 128):
        given = [share(cores, part, parts) for part in range(parts)]
        assert sorted(cpu for cpus in given for cpu in cpus) == list(range(256))
        assert max(map(len, given)) - min(map(len, given)) <= 2
        assert all((cpu + 128) % 256 in cpus for cpus in given for cpu in cpus)


def test_gpus_by_number_and_by_name():
    buses = list(GPUS)
    assert visible_gpus(ANSWER, None) == tuple(buses)
    assert visible_gpus(ANSWER, "3,1") == (buses[3], buses[1])
    assert visible_gpus(ANSWER, "GPU-2a5f,GPU-0a5f6c1e") == (buses[2], buses[0])
    assert visible_gpus(ANSWER, "") == ()
    assert visible_gpus("No devices were found\n", None) == ()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (3, 8)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2)),
        ({"HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4"}, (1, 4)),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}, (1, 4)),
        ({"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, (1, 4)),
        ({"SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),5"}, (0, 5)),
        ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, (5, 8)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_LOCALID": "7"}, (0, 2)),
        ({}, (0, 1)),
    ],
)
def test_the_local_rank_of_each_launcher(environment, expected):
    assert local_rank(environment) == expected


def test_the_local_ranks_are_those_of_the_launchers_table():
    """bind.py is run by its path and imports nothing of the package, so it has a copy of its own."""
    assert list(LOCAL_RANK.items()) == [(launcher.local_rank, launcher.local_size) for launcher in LAUNCHERS]


def test_what_the_user_has_set_stays():
    """NCCL gets no list of adapters: it looks for the nearest itself, and the ranks of a host need the same list."""
    yields = "OMPI_MCA_mpi_yield_when_idle"
    chosen = Binding(adapter="mlx5_1:1", cpus=[0, 1], num_cores=2)
    assert bind.settings(chosen, {}) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "UCX_NET_DEVICES": "mlx5_1:1",
        yields: "0",
    }
    assert bind.settings(chosen, {"UCX_NET_DEVICES": "all", "CUDA_DEVICE_ORDER": "x", yields: "1"}) == {}


def test_a_rank_with_a_single_core_yields_it(dgx):
    for cpus, yields in ("0,1,128,129", "1"), ("0-3,128-131", "0"):
        chosen = plan(machine(dgx, cpus, answer=""), 1, 2)
        assert bind.settings(chosen, {})["OMPI_MCA_mpi_yield_when_idle"] == yields
    assert "OMPI_MCA_mpi_yield_when_idle" not in bind.settings(plan(machine(dgx, "0", answer=""), 0, 2), {})


def test_mistakes_are_one_sentence(dgx):
    code, output = run_bind("true", SYSFS=str(dgx))
    assert code == 2 and "SYSFS describes another machine: give --dry-run, or unset it" in output
    assert "no command was given" in run_bind()[1]
    assert run_bind("largebatch-no-program")[1].endswith("bind.sh: largebatch-no-program: No such file or directory\n")


def test_a_broken_driver_ends_the_job(tmp_path, monkeypatch):
    """Ranks that went on without its answer would divide the cores in another way than those that have it."""
    silent = tmp_path / "nvidia-smi"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bind, "QUERY_LIMIT_S", 0.1)
    with pytest.raises(SystemExit, match="nvidia-smi on .* gave no answer in 0.1 s: look for NVRM and Xid in dmesg"):
        bind.this_machine({})


def test_a_line_for_each_host_and_with_a_dry_run_for_each_rank():
    for rank, real in ("0", 1), ("1", 0):
        ranks = {"OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        assert run_bind("true", **ranks)[1].count("bind.sh: ") == real
        assert run_bind("--dry-run", "true", **ranks)[1].count(f" local rank {rank} of 2: ") == 1


def test_the_exit_code_is_the_commands():
    assert run_bind("sh", "-c", "exit 75")[0] == 75


def test_memory_is_bound_where_numactl_can():
    """Bind to this machine's own node; if a container forbids it, a note says so."""
    chosen = Binding(node=0)
    command = bind.memory_command(chosen)
    if command:
        policies = subprocess.run([*command, "cat", "/proc/self/numa_maps"], capture_output=True, text=True).stdout
        assert "bind:0" in policies and not chosen.notes
    else:
        assert chosen.node == -1 and chosen.notes[0].startswith("memory is not bound: ")


def test_memory_without_numactl(monkeypatch):
    monkeypatch.setenv("PATH", "")
    chosen = Binding(node=0)
    assert bind.memory_command(chosen) == [] and chosen.node == -1
    assert chosen.notes == ["memory is not bound: there is no numactl"]
