"""What saves memory, time or bandwidth computes the same."""

import pytest
import torch
from parts import seen_by_optimizer, small_trainer, tiny_vit
from torch import nn

from largebatch.data.order import Plan

DROPOUT = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.1}
PASSES = 2


def plan_for(comm, *, steps: int = 1, left_over: int = 0) -> Plan:
    batch = comm.size * PASSES * 4
    return Plan(
        num_samples=50, global_batch_size=batch, micro_batch_size=4, num_images=steps * batch + left_over, seed=0
    )


def gradients_of(comm, model: nn.Module, **options) -> list[torch.Tensor]:
    """What the optimizer sees in the first step."""
    trainer = small_trainer(comm, plan_for(comm), passes=PASSES, model=model, **options)
    return seen_by_optimizer(trainer, trainer.open_batches(0))[0]


# -- recomputation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputed_blocks_give_the_same_reduced_gradient(comm, precision):
    """To the last bit, over two passes with every kind of dropout."""
    kept, recomputed = tiny_vit(**DROPOUT), tiny_vit(**DROPOUT)
    recomputed.set_grad_checkpointing()
    one, other = (gradients_of(comm, model, precision=precision) for model in (kept, recomputed))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
