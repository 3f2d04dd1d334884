"""What all ranks do when the training loss diverges. Its value is planted; its gradient is that of real training."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import CLASSES, OddModel, plan_for, small_trainer

from largebatch import checkpoint
from largebatch.config import ModelConfig, RunConfig, TrainConfig, dump
from largebatch.engine import Hook, Trainer
from largebatch.hooks import Checkpoint, Divergence, Mirroring, ReplicaCheck, divergence, replicas
from largebatch.ranks import Ranks, Stopped
from zoo.weights import named_weights

STEPS, EVERY, RISES_AFTER = 22, 5, 12
# Five losses at a window of 3, as 1 - (2/3)^5 > 0.85; the fifth has come in the sixth step.
FOUND = RISES_AFTER + 6


def falls(trainer: Trainer) -> float:
    return 1.9 - 0.03 * trainer.state.step


def rises_once(trainer: Trainer) -> float:
    return 5.0 if trainer.state.step >= RISES_AFTER and not trainer.state.halvings else falls(trainer)


def rises_always(trainer: Trainer) -> float:
    return 5.0 if trainer.state.step >= RISES_AFTER else falls(trainer)


class Noting(Hook):
    """Notes each step with its learning rate, and the returns."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []
        self.returns: list[int] = []

    def after_train_step(self, trainer: Trainer, output: Any) -> None:
        self.seen.append((trainer.state.step, trainer.optimizer.param_groups[0]["lr"]))

    def after_rollback(self, trainer: Trainer) -> None:
        self.returns.append(trainer.state.step)


@pytest.fixture(autouse=True)
def short_window(monkeypatch) -> None:
    monkeypatch.setattr(divergence, "SHORTEST", 3)


def build(
    comm: Ranks, folder: Path, action: str, planted: Callable[[Trainer], float], *, every: int = EVERY
) -> Trainer:
    """A small run with dropout and mixup, resumed if its folder has a checkpoint."""
    plan = plan_for(comm, steps=STEPS)
    trainer = small_trainer(comm, plan, passes=2, model=OddModel(dropout=0.2))
    healthy = trainer.objective

    def objective(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = healthy(model, batch)
        return loss - loss.detach() + planted(trainer) * len(batch.images)

    trainer.objective = objective
    config = TrainConfig(
        model=ModelConfig(num_classes=CLASSES), run=RunConfig(folder=str(folder), on_divergence=action)
    )
    mirror = checkpoint.Mirror(str(folder / "mirror"), folder)
    copying = Mirroring(mirror)
    watch = Divergence(config, complete_saves=lambda trainer: saving.complete(trainer.comm), mirror=mirror)
    comparing = ReplicaCheck(interval_images=10**9, with_optimizer=True)
    saving = Checkpoint(
        folder,
        every_images=every * plan.global_batch_size,
        keep=2,
        config_text=dump(config),
        before_save=[watch.settle, comparing.check],
        after_save=copying.start,
    )
    trainer.hooks = [watch, comparing, saving, copying, Noting()]
    checkpoint.resume(config, trainer)
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(trainer.model).items()}


def test_a_run_goes_back_and_on_at_half_the_rate_bit_for_bit_also_resumed(comm, tmp_path):
    """As a run whose schedule halves there, and that never saw the rise; wherever the rise was interrupted."""
    reference = build(comm, tmp_path / "reference", "stop", falls)
    rate = reference.learning_rate
    reference.learning_rate = lambda plan, step: rate(plan, step) * (0.5 if step >= 10 else 1.0)
    reference.fit()
    for number, stops in enumerate([(), (13, 16, 20)]):
        for max_steps in (*stops, 0):
            trainer = build(comm, tmp_path / str(number), "halve", rises_once)
            trainer.fit(max_steps=max_steps)
        assert trainer.state.step == STEPS and trainer.state.halvings == 1
        expected = weights(reference)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(trainer).items()), stops
        if not stops:
            (back,) = trainer.hooks[-1].returns
            steps = [step for step, _ in trainer.hooks[-1].seen]
            turn = max(range(1, len(steps)), key=lambda place: steps[place - 1] - steps[place])
            assert back == 10 and (steps[turn - 1], steps[turn]) == (FOUND, 11)
            assert trainer.hooks[-1].seen[turn][1] == pytest.approx(rate(reference.plan, 10) / 2)
            turns = comm.allgather_object(turn, name="test/turn")
            assert turns == comm.size * [turn]
            kept = [int(path.name) for path in checkpoint.checkpoints(tmp_path / "0")]
            assert kept == [22, 20] * (comm.rank == 0)
            there = checkpoint.Mirror(str(tmp_path / "0" / "mirror"), tmp_path / "0")._checkpoints()
            assert there == dict.fromkeys(kept, True)


def test_a_run_stops_on_all_ranks_with_the_way_to_go_on(comm, tmp_path):
    trainer = build(comm, tmp_path, "stop", rises_once)
    with pytest.raises(Stopped) as stopped:
        trainer.fit()
    assert comm.allgather_object(trainer.state.step, name="test/step") == comm.size * [FOUND]
    message = str(stopped.value)
    assert message.startswith("Training stopped at step 18, as the training loss diverged: smoothed over 3 steps")
    assert "it has risen since step 12, and it counts as diverged above" in message
    assert "--run.on_divergence halve goes back to the checkpoint of step 10, from before the rise" in message
    # Its checkpoint of step 15 is from the rise.
    trainer = build(comm, tmp_path, "halve", rises_once)
    assert trainer.state.step == 15
    trainer.fit()
    assert trainer.hooks[-1].returns == [10] and trainer.state.step == STEPS


def test_the_rate_is_halved_three_times_at_most(comm, tmp_path):
    """With checkpoints so close that the two newest are from the rise when it is found: an older one is kept."""
    trainer = build(comm, tmp_path, "halve", rises_always, every=2)
    with pytest.raises(Stopped, match="The learning rate was halved 3 times before .*: begin anew in another"):
        trainer.fit()
    assert trainer.hooks[-1].returns == [12, 12, 12]
    rates = [lr for step, lr in trainer.hooks[-1].seen if step == 13]
    assert rates == pytest.approx([rates[0] / 2**k for k in range(4)])


def test_without_a_checkpoint_from_before_the_rise_a_run_stops(comm, tmp_path):
    trainer = build(comm, tmp_path, "halve", rises_once, every=14)
    with pytest.raises(Stopped, match="There is no checkpoint from before the rise: begin anew"):
        trainer.fit()


def test_a_run_that_ignores_it_warns_once(comm, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trainer = build(comm, tmp_path, "ignore", rises_always)
    trainer.fit()
    assert trainer.state.step == STEPS
    told = [record for record in caplog.records if record.name == divergence.__name__]
    assert [record.levelname for record in told] == ["INFO", "WARNING"] * (comm.rank == 0)
    if told:
        assert "the training loss sags" in told[0].message and "the training loss diverged" in told[1].message


def test_replicas_are_compared_again(comm, tmp_path, monkeypatch):
    """Also after steps whose weights were compared before the return, as the save at the return compares, too."""
    compared: list[int] = []
    monkeypatch.setattr(replicas, "check_replicas", lambda *_, place, remedy: compared.append(int(place.split()[-1])))
    build(comm, tmp_path, "halve", rises_once).fit()
    assert compared == [5, 10, 15, 10, 15, 20, 22]
