"""A batch ramp: as the serial run for any ranks, resumed anywhere to the bit, and led by the noise scale."""

import math
from pathlib import Path

import pytest
import torch
from parts import OddModel, replicas_agree, serial_run, small_trainer

from largebatch import checkpoint, hooks
from largebatch.config import RunConfig, TrainConfig, dump
from largebatch.data.order import Plan
from largebatch.engine import Hook, Trainer
from largebatch.files.run_folder import Row
from largebatch.hooks import noise_ramp
from largebatch.hooks.noise_scale import NoiseScale
from largebatch.ranks import Ranks

MICRO = 4
PHASES = ((0, 8), (16, 20), (56, 36))  # 2, 5 and 9 micro-batches: on three ranks, one has none at first
PLAN = Plan(num_samples=37, global_batch_size=36, micro_batch_size=MICRO, num_images=133, seed=1, phases=PHASES)
HALF_LIFE = 60  # of the second moment, in images
BY_NOISE = Plan(num_samples=37, global_batch_size=40, micro_batch_size=MICRO, num_images=210, seed=1, phases=((0, 8),))


def rooted(batch_size: int) -> float:
    return math.sqrt(batch_size / 36)


def growing(comm: Ranks, plan: Plan = PLAN, **options) -> Trainer:
    """A run with a ramp, wrapped for the passes of another batch; the second moment follows the batch."""
    trainer = small_trainer(comm, plan, passes=1, model=OddModel(), **options)
    rate = trainer.learning_rate
    trainer.learning_rate = lambda plan, step: rate(plan, step) * rooted(plan.batch_size(step))
    for group in trainer.optimizer.param_groups:
        group["half_life"] = HALF_LIFE
    return trainer


class Rows(hooks.Sink):
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write_step(self, row: Row) -> None:
        self.rows.append(row)


class Sizes(Hook):
    """Keeps the images of each step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def after_train_step(self, trainer, output) -> None:
        self.found.append(output.images)


def test_any_number_of_ranks_trains_as_one_in_every_phase(comm):
    """With mixup; the last step is short."""
    trainer, sizes = growing(comm, dtype=torch.float64), Sizes()
    trainer.hooks = [sizes]
    trainer.fit()
    serial = serial_run(PLAN, OddModel().double(), rooted, half_life=HALF_LIFE)
    for ours, theirs in zip(trainer.model.parameters(), serial.parameters()):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()
    assert sizes.found == [8, 8, 20, 20, 36, 36, 5]
    assert replicas_agree(comm, trainer.model, "ramp/replicas")


def by_noise(comm: Ranks) -> tuple[Trainer, Rows]:
    trainer, rows = growing(comm, BY_NOISE), Rows()
    noise = NoiseScale(every_images=1, after_row=noise_ramp.follow_noise)
    trainer.hooks = [noise, hooks.Log([rows], every_images=1, noise=noise)]
    return trainer, rows


@pytest.fixture
def decides_early(monkeypatch) -> None:
    monkeypatch.setattr(noise_ramp, "HORIZON", 3)


def test_the_batch_doubles_when_the_noise_scale_exceeds_it(comm, decides_early):
    """The phases are those that the rows of the run ask for; the images are the stream, each once."""
    trainer, rows = by_noise(comm)
    sizes = Sizes()
    trainer.hooks = [sizes, *trainer.hooks]
    trainer.fit()
    phases = trainer.state.phases
    assert all(one == phases for one in comm.allgather_object(phases, name="ramp/phases"))
    assert trainer.state.images == BY_NOISE.num_images == sum(sizes.found)
    assert len(sizes.found) == trainer.num_steps == trainer.state.step == trainer.last_step
    for number, row in enumerate(rows.rows, start=1):
        before = max(phase for phase in phases if phase[0] < row["images"])
        asked = number >= 3 and row["noise_scale"] > before[1] < 40 and row["images"] < BY_NOISE.num_images
        expected = [(row["images"], min(40, 2 * before[1]))] if asked else []
        assert [phase for phase in phases if phase[0] == row["images"]] == expected, row
    if comm.rank == 0:
        assert [batch for _, batch in phases] == [8, 16, 32, 40], phases


@pytest.mark.parametrize("kind", ["phases", "noise"])
def test_a_run_resumed_at_any_step_goes_on_with_the_same_bits(comm, kind, decides_early, tmp_path_factory):
    """By the files of a checkpoint. The resumed trainer begins with other weights, and with the first phases."""
    folder = Path(comm.broadcast_object(str(tmp_path_factory.mktemp("ramp")), name="ramp/folder"))
    make = (lambda: by_noise(comm)[0]) if kind == "noise" else lambda: growing(comm)
    whole = make()
    whole.fit()
    for stop in range(1, whole.num_steps):
        config = TrainConfig(run=RunConfig(folder=str(folder / str(stop))))
        first = make()
        saving = hooks.Checkpoint(config.folder, every_images=10**9, keep=2, config_text=dump(config))
        first.hooks = [saving, *first.hooks]
        first.fit(max_steps=stop)
        resumed = make()
        torch.nn.init.ones_(resumed.model[0].weight)
        assert checkpoint.resume(config, resumed) and resumed.state.step == stop
        resumed.fit()
        assert resumed.total_losses() == pytest.approx(whole.total_losses(), rel=1e-12)
        resumed.state.losses = whole.state.losses  # as they were when they were saved, here at different steps
        assert resumed.state == whole.state and resumed.plan == whole.plan
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(tensor, resumed.model.state_dict()[name]), (stop, name)
