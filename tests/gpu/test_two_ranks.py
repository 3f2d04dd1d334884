"""Two ranks reduce gradients of their devices under real launchers. On two GPUs nobody has run this (2026-11-26)."""

import pytest
import torch
from launch import launch


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_gradients_in_buckets_are_exact_also_after_a_step_in_which_a_rank_leaves_out_a_layer(device, launcher):
    """Over torch.distributed and Horovod: by NCCL on GPUs, by Gloo and MPI on CPUs."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs: NCCL refuses them on one")
    if launcher == "mpirun":
        horovod = pytest.importorskip("horovod.torch", reason="Horovod is not installed")
        if device.type == "cuda" and not horovod.nccl_built():
            pytest.skip("Horovod is built without NCCL")
    program = ["-m", "tests.mpi.programs", "reduces_by_rank", device.type]
    code, output = launch(program, ranks=2, launcher=launcher, cold=device.type == "cuda")
    assert code == 0, output
    assert [output.count(f"sums are exact on rank {rank}, {device.type}") for rank in range(2)] == [1, 1], output
