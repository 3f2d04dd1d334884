"""Training across hosts, under each launcher and without any option for the network."""

import csv

import pytest
import torch
import warm
from runs import different
from training import LAUNCHERS, ONE_THREAD, launcher_on, start, state


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_knows_its_place_on_uneven_hosts(hosts, launcher, tmp_path):
    """rank, host, local rank and size; cross rank and size: among the ranks of that local rank on all hosts."""
    command = [*launcher_on(launcher, "h1:2,h2:1,h3:1"), warm.python(), "-m", "tests.cluster.place", str(tmp_path)]
    code, output = hosts.run("h1", command, timeout_s=150, environment=ONE_THREAD)
    assert code == 0, output
    places = [file.read_text().strip() for file in sorted(tmp_path.iterdir())]
    assert places == ["0 h1 0 2 0 3", "1 h1 1 2 0 1", "2 h2 0 1 1 3", "3 h3 0 1 2 3"], output


def trained(hosts, launcher, where, folder) -> dict[str, torch.Tensor]:
    """Steps of full length from the first one on, so that a sum in another order shows."""
    options = ["--run.max_steps", "20", "--schedule.warmup", "0 steps"]
    code, output = start(hosts, launcher, where, folder, *options).wait(400)
    assert code == 0, output
    return state(folder)


@pytest.fixture(scope="module")
def one_host(session_hosts, tmp_path_factory):
    """A function: the state after 20 steps of 4 ranks on one host, by MPI or Gloo, computed once."""
    known: dict[str, dict[str, torch.Tensor]] = {}

    def one(launcher: str) -> dict[str, torch.Tensor]:
        by = "horovodrun --gloo" if "gloo" in launcher else "mpirun"
        if by not in known:
            known[by] = trained(session_hosts, by, "h1:4", tmp_path_factory.mktemp("one_host"))
        return known[by]

    return one


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_hosts_train_as_one_does_bit_for_bit(hosts, one_host, launcher, tmp_path):
    """20 steps of 2 hosts x 2 ranks and of 1 host x 4 ranks: the order of sums is of ranks, not of hosts."""
    across = trained(hosts, launcher, "h1:2,h2:2", tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "h1: rank 0" in log and "h2: rank 2" in log
    assert different(across, one_host(launcher)) == []


def test_a_sum_in_another_order_would_show(one_host):
    """MPI and Gloo add four ranks in orders of their own."""
    assert different(one_host("mpirun"), one_host("horovodrun --gloo")) != []


def losses(hosts, launcher, where, folder, *options: str) -> list[float]:
    """Those of two steps, the first one short: of full length, LAMB's first takes the sign even of what is rounding."""
    code, output = start(hosts, launcher, where, folder, "--run.max_steps", "2", *options).wait(400)
    assert code == 0, output
    with open(folder / "steps.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def plain_losses(session_hosts, tmp_path_factory):
    return losses(session_hosts, "mpirun", "h1:4", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_a_model_shared_by_two_hosts_trains_as_one_on_every_rank_does(hosts, plain_losses, launcher, tmp_path):
    """Two stages, one on each host, and in both a ring of two ranks: torch's Gloo finds its way as Horovod does."""
    sharing = "--parallel.pipeline 2 --parallel.sequence 2 --data.micro_batch_size 16".split()
    shared = losses(hosts, launcher, "h1:2,h2:2", tmp_path, *sharing)
    assert len(shared) == 2 and shared == pytest.approx(plain_losses, abs=5e-6)


def test_a_slow_link_slows_training_and_does_no_more(hosts, tmp_path):
    """100 Mbit/s: the 22 MB of gradients of ViT-Ti/16 take seconds a step."""
    hosts.limit("h2", "100mbit")
    options = ["--model", "vit_ti16", "--run.max_steps", "2"]
    code, output = start(hosts, "mpirun", "h1:1,h2:1", tmp_path, *options).wait(300)
    assert code == 0, output
