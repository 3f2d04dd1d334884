"""LAMB's state in pieces over the ranks: as if every rank had all of it."""

import pytest
import torch
import torch.nn.functional as F
from parts import CLASSES, images, small_model

from largebatch.config.parallel import ParallelConfig
from largebatch.optim import Lamb, clip_gradients, gradient_norm, init_state
from largebatch.parallel.cuts import cuts_of
from largebatch.parallel.mesh import Mesh, start_torch_distributed
from largebatch.parallel.sharded_lamb import ShardedLamb, global_norm
from largebatch.parallel.state_sharding import Sharding, state_bytes

PASSES, MICRO = 2, 3


@pytest.fixture(scope="module")
def mesh(comm):
    """torch.distributed over the same ranks, beside Horovod if they speak by that."""
    start_torch_distributed(comm, torch.device("cpu"))
    return Mesh(ParallelConfig(zero=1).shape())


def train(comm, model, optimizer, steps, norm_of):
    """Accumulated over passes, averaged over ranks, clipped."""
    for step in steps:
        for number in range(PASSES):
            first = ((step * comm.size + comm.rank) * PASSES + number) * MICRO
            samples = list(range(first, first + MICRO))
            labels = torch.tensor(samples) % CLASSES
            F.cross_entropy(model(images(samples, dtype=torch.float64)), labels).backward()
        optimizer.synchronize()
        norm = norm_of(optimizer)
        clip_gradients(optimizer, norm, 0.5)
        assert optimizer.step_if_finite(torch.amp.GradScaler("cpu", enabled=False), norm)
        optimizer.zero_grad()


@pytest.mark.parametrize("offload", [False, True])
def test_as_whole_state_on_every_rank(comm, mesh, offload):
    """The stem is frozen for five steps, so that its counters differ."""
    options = dict(lr=0.02, weight_decay=0.3, impl="eager")
    model, reference = small_model().double(), small_model().double()
    optimizer = comm.wrap(ShardedLamb(model.parameters(), **options), model, passes=PASSES, watch=False)
    plain = comm.wrap(Lamb(reference.parameters(), **options), reference, passes=PASSES)
    parameters = dict(model.named_parameters())
    sharding = Sharding(parameters, cuts_of(model), mesh, zero=True, offload=offload)
    optimizer.sharding = sharding
    for one in (optimizer, plain):
        init_state(one)
    numel = sum(p.numel() for p in model.parameters())
    assert state_bytes(plain) == 16 * numel and abs(state_bytes(optimizer) - 16 * numel / comm.size) <= 16

    optimizer.freeze(model[0].parameters())
    plain.freeze(reference[0].parameters())
    for steps in (range(5), range(5, 10)):
        train(comm, model, optimizer, steps, lambda one: global_norm(one, sharding))
        train(comm, reference, plain, steps, gradient_norm)
        for p, q in zip(model.parameters(), reference.parameters()):
            assert (p - q).norm() <= 1e-12 * q.norm()
            found, expected = optimizer.state_of(p), plain.state[q]
            assert found["step"] == expected["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                assert (found[key] - expected[key]).norm() <= 1e-12 * expected[key].norm()
            if p.requires_grad:
                torch.testing.assert_close(optimizer.trust_ratios[p], plain.trust_ratios[q], rtol=1e-12, atol=0)
        optimizer.unfreeze(model[0].parameters())
        plain.unfreeze(reference[0].parameters())
