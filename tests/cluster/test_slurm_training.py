"""Training under Slurm: mpirun in the allocation, and srun straight to the ranks, with PMIx and without any PMI."""

import shlex

import pytest
from training import ONE_THREAD, training

TWO_NODES = ["-N", "2", "-n", "4", "--ntasks-per-node=2"]


def assert_trained(folder) -> None:
    log = (folder / "log.txt").read_text()
    assert "h1: rank 0" in log and "h2: rank 2" in log and "= 4 ranks × 4 micro-batch" in log, log
    assert (folder / "checkpoints" / "00000002").is_dir(), log


def test_mpirun_in_a_batch_job_finds_ranks_and_hosts_in_the_allocation(slurm, tmp_path):
    command = shlex.join(["mpirun", *training(tmp_path / "run", "--run.max_steps", "2")])
    arguments = [*TWO_NODES, f"--output={tmp_path}/out", "--wrap", command]
    job = slurm.sbatch(*arguments, environment=ONE_THREAD)
    assert slurm.wait(job, timeout_s=200) == ("COMPLETED", 0), (tmp_path / "out").read_text()
    assert_trained(tmp_path / "run")


@pytest.mark.parametrize("mpi", ["pmix", "none"])
def test_srun_starts_the_ranks_itself(slurm, mpi, tmp_path):
    """pmix: MPI, the wheel's client speaks to Slurm's server; none: Gloo, as MPI cannot start there."""
    command = ["srun", *TWO_NODES, f"--mpi={mpi}", *training(tmp_path, "--run.max_steps", "2")]
    code, output = slurm.run(command, timeout_s=200, environment=ONE_THREAD)
    assert code == 0, output
    assert_trained(tmp_path)


def test_a_job_that_lost_a_node_starts_again_on_the_others(slurm, tmp_path):
    """Slurm itself sees that the node is gone, and starts the job again on those that are left."""
    script = tmp_path / "job.sh"
    command = shlex.join(training(tmp_path / "run", "--run.max_steps", "2"))
    script.write_text(
        "#!/bin/sh\n"
        "echo ${SLURM_RESTART_COUNT:-0} $SLURM_JOB_NODELIST\n"
        "[ -n \"$SLURM_RESTART_COUNT\" ] || srun --mpi=none sleep 1000\n"
        f"mpirun {command}\n"
    )
    # h1 runs Slurm's own daemons, and the script
    arguments = [*TWO_NODES, "--requeue", "--open-mode=append", f"--output={tmp_path}/out", str(script)]
    job = slurm.sbatch(*arguments, environment=ONE_THREAD)
    seen = slurm.wait_for_state(job, "RUNNING", timeout_s=30)
    assert seen["NodeList"] == "h[1-2]"
    slurm.hosts.kill("h2")
    slurm.wait_for_state(job, "PENDING", timeout_s=60)
    assert slurm.wait(job, timeout_s=200) == ("COMPLETED", 0), (tmp_path / "out").read_text()
    assert (tmp_path / "out").read_text().startswith("0 h[1-2]\n"), (tmp_path / "out").read_text()
