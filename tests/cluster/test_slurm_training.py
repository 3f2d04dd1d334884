"""Training under Slurm: mpirun in the allocation, and srun straight to the ranks, with PMIx and without any PMI."""

import shlex

import pytest
from hosts import wait_for
from training import ONE_THREAD, training

TWO_NODES = ["-N", "2", "-n", "4", "--ntasks-per-node=2"]


def assert_trained(folder, *, second_host: str = "h2") -> None:
    log = (folder / "log.txt").read_text()
    assert "h1: rank 0" in log and f"{second_host}: rank 2" in log and "= 4 ranks × 4 micro-batch" in log, log
    assert (folder / "checkpoints" / "00000002").is_dir(), log


def test_mpirun_in_a_batch_job_finds_ranks_and_hosts_in_the_allocation(slurm, tmp_path):
    command = shlex.join(["mpirun", *training(tmp_path / "run", "--run.max_steps", "2")])
    arguments = [*TWO_NODES, f"--output={tmp_path}/out", "--wrap", command]
    job = slurm.sbatch(*arguments, environment=ONE_THREAD)
    assert slurm.wait(job, timeout_s=300) == ("COMPLETED", 0), (tmp_path / "out").read_text()
    assert_trained(tmp_path / "run")


@pytest.mark.parametrize("mpi", ["pmix", "none"])
def test_srun_starts_the_ranks_itself(slurm, mpi, tmp_path):
    """pmix: MPI, the wheel's client speaks to Slurm's server (train_slurm.sbatch says why tree); none: Gloo, as MPI
    cannot start there."""
    command = ["srun", *TWO_NODES, f"--mpi={mpi}", *training(tmp_path, "--run.max_steps", "2")]
    code, output = slurm.run(command, timeout_s=300, environment=ONE_THREAD | {"SLURM_PMIX_FENCE": "tree"})
    assert code == 0, output
    assert_trained(tmp_path)


def test_a_job_that_lost_a_node_starts_again_on_the_others(slurm, tmp_path):
    """Slurm itself sees that the node is gone; the script, on h1, waits in its first life to lose it."""
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/sh\n"
        "echo life ${SLURM_RESTART_COUNT:-0}\n"
        '[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 1000\n'
        f"mpirun {shlex.join(training(tmp_path / 'run', '--run.max_steps', '2'))}\n"
    )
    arguments = [*TWO_NODES, "--requeue", "--open-mode=append", f"--output={tmp_path}/out", str(script)]
    job = slurm.sbatch(*arguments, environment=ONE_THREAD)
    assert slurm.wait_for_state(job, "RUNNING", timeout_s=60)["NodeList"] == "h[1-2]"
    wait_for(lambda: (tmp_path / "out").exists() and "life 0" in (tmp_path / "out").read_text(), "the script", 60)
    slurm.hosts.kill("h2")
    # Between its lives the job is NODE_FAIL for a moment, then PENDING for some seconds: a slow answer may miss both.
    wait_for(lambda: "life 1" in (tmp_path / "out").read_text(), "the second life", 180)
    assert slurm.wait(job, timeout_s=300) == ("COMPLETED", 0), (tmp_path / "out").read_text()
    assert_trained(tmp_path / "run", second_host="h3")
