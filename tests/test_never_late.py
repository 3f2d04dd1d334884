"""The host does not wait for the device inside a training step: `waits.Waits` notes each read and each copy.

A host that waits cannot prepare the next kernels, so the device has nothing to do meanwhile.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from waits import Waits

import zoo
from largebatch import checkpoint, engine
from largebatch.assembly.trainer import build_hooks
from largebatch.augment import Augment
from largebatch.batch_norm import BatchNormStatistics
from largebatch.config import parse
from largebatch.config.parallel import ParallelConfig
from largebatch.data import randaugment, randaugment_ops
from largebatch.data.order import MicroBatch, Plan
from largebatch.data.pixels import Normalise
from largebatch.data.stream import Batch, Encoded, labelled
from largebatch.data.token_labels import CELL, TokenLabels
from largebatch.engine import Hook, Trainer
from largebatch.hooks import Checkpoint
from largebatch.hooks.ema import Ema
from largebatch.losses import Objective, TokenLabeling, classification
from largebatch.optim import LookSam, build_optimizer, init_state
from largebatch.parallel.cuts import UNCUT
from largebatch.parallel.mesh import Axis
from largebatch.parallel.sharded_lamb import ShardedLamb, global_norm
from largebatch.parallel.state_sharding import Sharding
from largebatch.ranks import reduction
from largebatch.ranks.single import Single
from largebatch.recipes import choose
from largebatch.replica import Replica
from zoo.volo import STRUCTURES, VOLO

META = torch.device("meta")
CLASSES, SIDE, GLOBAL_BATCH = 10, 64, 16
# The step's only wait: it has to know whether the gradient is finite.
READS = {"largebatch/ranks/reduction.py: Reduced.step_if_finite"}


class Alone(Single):
    """Refuses what Horovod would wait for the GPU with."""

    def start_allreduce(self, tensor: Tensor, **options: Any) -> Tensor:
        assert tensor.device.type == "cpu" or options["name"] == "batch_norm", "Horovod would wait for the GPU"
        return super().start_allreduce(tensor, **options)


def label_maps(count: int, *, layers: int, device: torch.device) -> TokenLabels:
    ids = torch.rand(count, CLASSES, 18, 18, device=device).topk(5, dim=1).indices.int()  # a teacher's are distinct
    whole = torch.eye(2, 3, dtype=torch.float64, device=device)
    warp = whole.repeat(count, layers, 1, 1) if layers else None
    return TokenLabels(ids, torch.rand(ids.shape, device=device).half(), whole.repeat(count, 1, 1), warp)


def trainer_for(
    model: nn.Module,
    objective: Objective,
    augment: Augment,
    *,
    device: torch.device,
    optimizer_name: str = "lamb",
    taught: bool = False,
    sam: LookSam | None = None,
) -> Trainer:
    """A trainer of a model on a device, with clipping, an average of the weights, and two passes a step."""
    plan = Plan(num_samples=100, global_batch_size=GLOBAL_BATCH, micro_batch_size=8, num_images=1600, seed=0)
    model = model.to(device)
    optimizer: Any = build_optimizer(model, name=optimizer_name, lr=0.01, weight_decay=0.1)
    init_state(optimizer)
    if sam:
        sam.begin(optimizer)
    comm, replica = Alone(), Replica()
    optimizer = comm.wrap(optimizer, model, passes=2)
    replica.attach(model, optimizer, comm)

    def open_batches(start: int) -> Iterator[Batch]:
        for step in range(start, plan.num_steps):
            for micro in plan.micro_batches(step, 0, 1):
                samples = plan.samples(micro.start, micro.stop)[1]
                images = torch.rand(len(samples), 3, SIDE, SIDE, device=device)
                labels = torch.randint(CLASSES, (len(samples),), device=device)
                maps = label_maps(len(samples), layers=2, device=device) if taught else None
                yield Batch(images, labels, micro.step, micro.number, samples, maps)

    return Trainer(
        comm=comm,
        model=model,
        objective=objective,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        learning_rate=lambda plan, step: 0.01,
        plan=plan,
        open_batches=open_batches,
        eval_batches=[],
        augment=augment,
        seed=0,
        precision="fp32",
        clip_norm=1.0,
        eval_images=10**9,
        device=device,
        replica=replica,
        sam=sam,
        hooks=hooks_of_a_run(model, plan),
    )


def hooks_of_a_run(model: nn.Module, plan: Plan) -> list[Hook]:
    """Those of a run, and an average of the weights; nothing is logged in the first steps."""
    rarely = "--log.every", "50 steps", "--log.to", "none"
    given = ["--run.folder", tempfile.mkdtemp(), "--model.num_classes", str(CLASSES), *rarely]
    config = parse(given, choose_recipe=choose)
    index: Any = SimpleNamespace(where=str)
    hooks = build_hooks(config, index, plan, Ema(model, half_life_images=1000), None, "")
    return [hook for hook in hooks if not isinstance(hook, Checkpoint)]  # it has weights to save at the end


def vit_with_cutmix(device: torch.device, optimizer_name: str = "lamb", sam: LookSam | None = None) -> Trainer:
    model = zoo.create_model("vit_nano32", img_size=SIDE, num_classes=CLASSES, proj_drop_rate=0.1, pos_drop_rate=0.1)
    augment = Augment(CLASSES, mixup_alpha=0.2, cutmix_alpha=1.0, erase_prob=0.5, label_smoothing=0.1)
    return trainer_for(model, classification, augment, device=device, optimizer_name=optimizer_name, sam=sam)


def vit_with_smaller_images(device: torch.device) -> Trainer:
    """As in the first phase of --schedule.image_sizes."""
    model = zoo.create_model("vit_nano32", img_size=2 * SIDE, num_classes=CLASSES)
    model.take_smaller_images()
    return trainer_for(model, classification, Augment(CLASSES), device=device)


def volo_with_token_labels(device: torch.device, **options: Any) -> Trainer:
    few = replace(STRUCTURES["volo_d1"], depths=(1, 2, 1, 1))
    with device:
        model = VOLO(few, img_size=SIDE, num_classes=CLASSES, drop_path_rate=0.5)
    options |= dict(grid=SIDE // CELL, ground_truth="published", erase_prob=0.5)
    augment = Augment(CLASSES, **options)
    return trainer_for(model, TokenLabeling(dense_weight=0.5), augment, device=device, taught=True)


def compute_nothing(monkeypatch) -> None:
    """Let the engine take the device "meta": autocast refuses it, and a copy for which nobody waits has no values."""
    monkeypatch.setattr(engine, "autocast", lambda device, precision: contextlib.nullcontext())
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: contextlib.nullcontext())
    monkeypatch.setattr(engine, "to_host", lambda tensor: lambda: torch.zeros(tensor.shape, dtype=tensor.dtype))


RUNS: dict[str, Callable[[torch.device], Trainer]] = {
    "ViT, LAMB": vit_with_cutmix,
    "ViT, LARS": lambda device: vit_with_cutmix(device, "lars"),
    "ViT, Muon": lambda device: vit_with_cutmix(device, "muon"),
    "ViT, Look-LayerSAM": lambda device: vit_with_cutmix(device, sam=LookSam(rho=0.05, every=5, alpha=0.7)),
    "ViT, smaller images": vit_with_smaller_images,
    "VOLO, MixToken": lambda device: volo_with_token_labels(device, mix_token=True),
    "VOLO, mixup": lambda device: volo_with_token_labels(device, mixup_alpha=0.2),
}
COPIES = {"largebatch/native/copies.py: to_device", "zoo/volo.py: _to_device"}  # from page-locked memory


@pytest.mark.parametrize("run", RUNS)
def test_a_training_step_does_not_wait_for_the_device(run, monkeypatch):
    compute_nothing(monkeypatch)
    trainer = RUNS[run](META)
    with Waits():
        trainer.fit(max_steps=1)  # numbers that stay the same may be copied here
    with Waits() as found:
        trainer.fit(max_steps=3)
    assert trainer.state.step == 3
    assert found.reads == READS
    assert found.copies <= COPIES


def test_a_step_at_moved_weights_waits_once_more(monkeypatch):
    """It has to know whether the first gradient is finite, before it moves the weights by it."""
    compute_nothing(monkeypatch)
    trainer = vit_with_cutmix(META, sam=LookSam(rho=0.05, every=1, alpha=0.7))
    with Waits():
        trainer.fit(max_steps=1)
    with Waits() as found:
        trainer.fit(max_steps=2)
    assert found.reads == READS | {"largebatch/optim/look_sam.py: LookSam.gradient"}
    assert found.copies <= COPIES


@pytest.mark.parametrize("text", ["rand-m9-n3-p0.9", "tf-m9-n3"])
def test_operations_on_pixels_do_not_wait_for_the_device(text):
    operations = randaugment.draw(randaugment.parse(text, 32), 0, *torch.arange(2 * 64).view(2, 64).numpy())
    images, normalise = torch.empty(64, 3, 32, 32, dtype=torch.uint8, device=META), Normalise((0.5,) * 3, (0.2,) * 3)
    with Waits():
        normalise.batch(images)
    with Waits() as found:
        normalise.batch(randaugment_ops.with_torch(images, (1, 2, 3), operations))
    assert found.reads == set()
    assert found.copies <= COPIES


def test_labels_and_label_maps_do_not_wait_for_the_device():
    shape, samples = (5, 2, 3), np.arange(4)
    index: Any = SimpleNamespace(label=np.arange(9), map_shape=np.array([shape]))
    room: Any = SimpleNamespace(maps=[np.zeros(4 * 5 * 2 * 3, dtype=np.uint8)] * 4)
    placement, warp = np.zeros((4, 2, 3)), np.zeros((4, 2, 2, 3))
    job = MicroBatch(step=3, number=5, start=0, stop=4)
    with Waits() as found:
        for encoded in (Encoded(job, samples, room, None, placement, warp), Encoded(job, samples, room, None)):
            batch = labelled(encoded, torch.empty(4, 3, 8, 8, device=META), index, META)
            assert batch.labels.device == META and batch.labels.shape == (4,) and batch.labels.dtype == torch.int64
    assert batch.token_labels is None and found.reads == set()
    assert found.copies <= COPIES


def test_lamb_in_parts_does_not_wait_for_the_device():
    """One rank that has everything: what is sent to others is not the question here."""
    mesh: Any = SimpleNamespace(axis=lambda name: Axis(name, 1, 0, (0,), None), shape=ParallelConfig().shape())
    model = nn.Linear(5, 3, device=META)
    parameters = dict(model.named_parameters())
    optimizer = ShardedLamb(model.parameters(), lr=0.1)
    optimizer.sharding = Sharding(parameters, dict.fromkeys(parameters, UNCUT), mesh)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    with Waits() as found:
        optimizer.clip_factor = global_norm(optimizer, optimizer.sharding)
        optimizer.step()
    assert found.reads == set()
    assert found.copies <= COPIES


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(self.norm(batch))


def test_the_passes_of_a_step_share_the_graphs_of_a_compiled_model():
    """Momentum is another number in each pass; the mean over ten of them is torch's own."""
    model, alone = Normalised(), Normalised()
    alone.norm.momentum = None
    statistics, graphs, counts = BatchNormStatistics(model, Alone()), [], []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    with statistics.over_steps():
        for number in range(10):
            batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
            compiled(batch)
            alone(batch)
            counts.append(len(graphs))
        assert counts[0] == counts[-1] > 0
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(getattr(model.norm, name), getattr(alone.norm, name))


@pytest.mark.parametrize("finite", [True, False])
def test_the_gpu_has_its_update_before_the_host_waits_for_the_norm(monkeypatch, finite):
    events: list[str] = []
    monkeypatch.setattr(reduction, "to_host", lambda tensor: lambda: events.append("read") or finite)
    model = nn.Linear(5, 3, device=META)
    optimizer = Single().wrap(build_optimizer(model, lr=0.1, weight_decay=0.1), model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.register_step_pre_hook(lambda *_: events.append("step"))
    optimizer.synchronize()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert optimizer.step_if_finite(scaler, torch.zeros((), device=META)) == finite
    assert events == ["step", "read"]
    assert {state["step"] for state in optimizer.state.values()} == {int(finite)}


class Copying(threading.Event):
    """Of a snapshot that is copied at the last moment: when the device must wait for the copy before it goes on."""

    def __init__(self, snapshot: checkpoint.Snapshot) -> None:
        super().__init__()
        self.snapshot, self.memory = snapshot, checkpoint.HostMemory()

    def copy(self) -> None:
        for part in (self.snapshot.weights, self.snapshot.state):
            part.update(self.memory.copy(dict(part)))
        self.set()

    def synchronize(self) -> None:
        if not self.wait(30):
            raise OSError("the device has not waited for the copy")


@pytest.mark.parametrize("run", RUNS)
def test_the_latest_copy_of_a_snapshot_has_the_bits_of_its_step(run, tmp_path, monkeypatch):
    """A save compares the sums of the file with those of its step, and fails if a bit differs."""
    take, copies = checkpoint.take_snapshot, list[bool]()

    def late(*, memory: Any, beside: bool, **parts: Any) -> checkpoint.Snapshot:
        beside &= parts["state"].step < 3  # no step follows the last one
        copies.append(beside)
        taken = take(memory=None if beside else memory, **parts)
        return replace(taken, copied=Copying(taken)) if beside else taken

    monkeypatch.setattr(checkpoint, "take_snapshot", late)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=Copying.copy))
    trainer = RUNS[run](torch.device("cpu"))
    saving = Checkpoint(tmp_path, every_images=GLOBAL_BATCH, keep=3, config_text="")
    trainer.hooks = [*trainer.hooks, saving]
    trainer.fit(max_steps=3)
    assert saving.writer.failure is None
    assert [int(path.name) for path in checkpoint.checkpoints(tmp_path)] == [3, 2, 1]
    assert copies == [run.startswith("ViT") and "SAM" not in run] * 2 + [False]
