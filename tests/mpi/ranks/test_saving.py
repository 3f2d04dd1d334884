"""Saving beside training: the moment, on which all ranks agree, and what they do while rank 0 writes."""

import copy
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from parts import plan_for, small_trainer

from largebatch import checkpoint
from largebatch.checkpoint import store
from largebatch.engine import Hook
from largebatch.hooks import Mirroring, checkpointing, mirroring
from largebatch.hooks.ema import Ema
from largebatch.ranks import Stopped
from zoo.weights import named_weights, read_weights


class Noting(checkpointing.Checkpoint):
    """Notes the steps that it saves, and the weights of each."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.saved: dict[int, dict[str, torch.Tensor]] = {}

    def save(self, trainer) -> None:
        self.saved[trainer.state.step] = {k: v.clone() for k, v in named_weights(trainer.model).items()}
        super().save(trainer)


class Stopping(Hook):
    """Stops the run in the third step."""

    def after_train_step(self, trainer, output) -> None:
        if trainer.state.step == 3:
            raise Stopped("planted")


def test_rank_0s_clock_decides_on_all_ranks(comm, tmp_path, monkeypatch):
    """A step takes a minute there, and an hour on the others. What the clock says is read one step later."""
    trainer = small_trainer(comm, plan_for(comm, steps=9), passes=2)
    hook = Noting(tmp_path, every_s=150.0, keep=2, config_text="")
    trainer.hooks = [hook]
    step_s = 60.0 if comm.rank == 0 else 3600.0
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(monotonic=lambda: step_s * trainer.state.step))
    trainer.fit()
    assert list(hook.saved) == [4, 8, 9]


@pytest.mark.parametrize("gathers", [False, True])
def test_training_goes_on_while_rank_0_writes(comm, tmp_path, monkeypatch, gathers):
    """The write of step 2 takes until the ranks have heard three times, in step 4, that it is not done.

    gathers: the model to save is a copy, as with ZeRO; the average of the weights is not.
    """
    plan = plan_for(comm, steps=5)
    trainer = small_trainer(comm, plan, passes=2)
    hook = Noting(tmp_path, every_images=2 * plan.global_batch_size, keep=3, config_text="")
    average = Ema(trainer.model, half_life_images=plan.global_batch_size)
    trainer.average, trainer.hooks = average.model, [average, hook]
    if gathers:
        monkeypatch.setattr(trainer.replica, "gather_whole", lambda: copy.deepcopy((trainer.model, trainer.optimizer)))
    release, heard = threading.Event(), []
    save, broadcast = checkpoint.save, comm.broadcast_object

    def slow(*arguments, **options):
        assert release.wait(60)
        return save(*arguments, **options)

    def listening(value, *, name):
        answer = broadcast(value, name=name)
        heard.append((name, trainer.state.step, answer))
        if len(heard) == 3:
            release.set()
        return answer

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(comm, "broadcast_object", listening)
    monkeypatch.setattr(checkpointing, "TELL_EVERY_S", 0.01)
    trainer.fit()
    assert heard[:3] == 3 * [("checkpoint/done", 4, False)] and heard[-1] == ("checkpoint/done", 5, True)
    for step, weights in hook.saved.items() if comm.rank == 0 else ():
        written = read_weights(tmp_path / "checkpoints" / f"{step:08d}" / "model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in weights.items()), step
    assert list(hook.saved) == [2, 4, 5]


@pytest.mark.parametrize("average", [False, True])
def test_a_disk_without_room_for_a_checkpoint_is_seen_before_the_first_step(comm, tmp_path, monkeypatch, average):
    """Weights, their average and two moments; a byte less is too little."""
    trainer = small_trainer(comm, plan_for(comm, steps=2), passes=1)
    trainer.average = copy.deepcopy(trainer.model) if average else None
    trainer.hooks = [Noting(tmp_path, every_images=10**6, keep=1, config_text="")]
    tensors = [*trainer.model.state_dict().values()] * (1 + average)
    tensors += [value for state in trainer.optimizer.state.values() for value in state.values()]
    needed = store.SPARE_BYTES + sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    said = " has .* GB free, a checkpoint needs .* GB: make room, or give another --run.folder"
    with pytest.raises(Stopped, match=said):
        trainer.fit()
    assert trainer.state.step == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    trainer.hooks[0].before_fit(trainer)


def test_a_save_that_hangs_ends_the_run(comm, tmp_path, monkeypatch):
    plan = plan_for(comm, steps=5)
    trainer = small_trainer(comm, plan, passes=2)
    trainer.hooks = [Noting(tmp_path, every_images=2 * plan.global_batch_size, keep=3, config_text="")]
    release = threading.Event()
    monkeypatch.setattr(checkpoint, "save", lambda *arguments, **options: release.wait(60))
    monkeypatch.setattr(checkpointing, "TELL_EVERY_S", 0.01)
    monkeypatch.setattr(comm, "hang_limit_s", 0.05)
    with pytest.raises(Stopped, match="the checkpoint of step 2 was not written in 0.05 s: .*--horovod.hang_limit_s"):
        trainer.fit()
    assert trainer.state.step == 4
    comm._closing.pop()()  # which does not wait again
    release.set()


def test_a_run_that_stops_completes_its_save(comm, tmp_path, monkeypatch):
    """All ranks stop in the third step, while that of the second is written; they wait before Horovod ends."""
    plan = plan_for(comm, steps=5)
    trainer = small_trainer(comm, plan, passes=2)
    trainer.hooks = [Noting(tmp_path, every_images=2 * plan.global_batch_size, keep=3, config_text=""), Stopping()]
    release, save = threading.Event(), checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda *arguments, **options: release.wait(60) and save(*arguments, **options)
    )
    with pytest.raises(Stopped):
        trainer.fit()
    assert checkpoint.checkpoints(tmp_path) == []
    release.set()
    comm._closing.pop()()
    assert len(checkpoint.checkpoints(tmp_path)) == (comm.rank == 0)


@pytest.fixture
def hanging(comm, tmp_path, monkeypatch):
    """A trainer of five steps with a checkpoint after each second, whose mirror does not answer."""
    plan = plan_for(comm, steps=5)
    trainer, release = small_trainer(comm, plan, passes=2), threading.Event()
    copying = Mirroring(checkpoint.Mirror(str(tmp_path / "mirror"), tmp_path))
    monkeypatch.setattr(copying.mirror, "update", lambda tell: release.wait(60))
    monkeypatch.setattr(mirroring, "TELL_EVERY_S", 0.01)
    every = 2 * plan.global_batch_size
    saving = Noting(tmp_path, every_images=every, keep=2, config_text="", after_save=copying.start)
    trainer.hooks = [saving, copying]
    yield trainer
    comm._closing.pop()()  # which does not wait again
    comm._closing.pop()()
    release.set()


def test_a_mirror_that_hangs_ends_the_run_after_its_last_checkpoint(comm, tmp_path, monkeypatch, hanging):
    monkeypatch.setattr(comm, "hang_limit_s", 0.05)
    with pytest.raises(Stopped, match="mirror lacks the last checkpoint .no answer in 0.05 s.; it is in .*copies it.$"):
        hanging.fit()
    assert list(hanging.hooks[0].saved) == [2, 4, 5]
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["00000005", "00000004"] * (comm.rank == 0)


def test_a_run_that_is_told_to_end_ends_so_though_its_mirror_hangs(comm, tmp_path, monkeypatch, hanging, caplog):
    monkeypatch.setattr(mirroring, "STOP_S", 0.05)

    class Told(Hook):
        def at_point(self, trainer) -> None:
            trainer.stop_reason = "a signal came" if trainer.state.step == 3 else ""

    hanging.hooks = [Told(), *hanging.hooks]
    assert hanging.fit() == "a signal came"
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["00000003", "00000002"] * (comm.rank == 0)
    assert ("lacks the last checkpoint (no answer in 0.05 s)" in caplog.text) == (comm.rank == 0)
