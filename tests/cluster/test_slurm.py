"""Slurm itself works as the other tests of this folder expect."""

from hosts import wait_for


def test_srun_runs_on_every_node(slurm):
    code, output = slurm.run(["srun", "-N", "3", "hostname"], timeout_s=60)
    assert code == 0 and sorted(output.split()) == ["h1", "h2", "h3"], output


def test_a_batch_job_ends_with_its_exit_code(slurm, tmp_path):
    job = slurm.sbatch("-N", "2", f"--output={tmp_path}/out", "--wrap", "srun hostname; exit 3")
    assert slurm.wait(job, timeout_s=60) == ("FAILED", 3)
    assert sorted((tmp_path / "out").read_text().split()) == ["h1", "h2"]


def test_an_urgent_job_preempts_by_signal_and_a_requeued_job_starts_again(slurm, tmp_path):
    """A job that ends by itself after the signal counts as failed: asking for the requeue is up to its script."""
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/sh\n"
        "trap 'echo signalled; scontrol requeue $SLURM_JOB_ID; exit 75' USR1\n"
        "echo ${SLURM_RESTART_COUNT:-0} started\n"
        "[ -n \"$SLURM_RESTART_COUNT\" ] || while :; do sleep 0.1; done\n"
    )
    options = ["-N", "3", "--exclusive", "--requeue", "--open-mode=append", "--signal=B:USR1@20"]
    job = slurm.sbatch(*options, f"--output={tmp_path}/out", str(script))
    slurm.wait_for_state(job, "RUNNING", timeout_s=60)
    output = tmp_path / "out"  # which may come a moment after that state
    wait_for(lambda: output.exists() and "started" in output.read_text(), "the job's first line", 60)
    urgent = ["-N", "3", "--exclusive", "-p", "urgent", f"--output={tmp_path}/urgent", "--wrap", "true"]
    assert slurm.wait(slurm.sbatch(*urgent), timeout_s=120) == ("COMPLETED", 0)
    # Until it is queued again, the first job has ended with the signal's exit code, and may be seen so.
    wait_for(lambda: "1 started" in output.read_text(), "the job's second start", 120)
    assert slurm.wait(job, timeout_s=60) == ("COMPLETED", 0)
    lines = output.read_text().splitlines()
    said = [line for line in lines if line and not line.startswith("slurmstepd")]  # which may note the requeue there
    assert said == ["0 started", "signalled", "1 started"]


def test_a_killed_host_is_seen_and_comes_back(slurm):
    slurm.hosts.kill("h3")
    slurm.hosts.mend()
    slurm.ready()
    assert slurm.run(["srun", "-N", "3", "true"], timeout_s=60)[0] == 0
