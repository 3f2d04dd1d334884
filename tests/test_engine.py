"""The loop around the step, in one process without Horovod: modes, means, what is due when; and choices by device."""

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zoo
from largebatch import precision
from largebatch.augment import Augment
from largebatch.data.order import Plan
from largebatch.data.stream import Batch
from largebatch.engine import Hook, StepOutput, Trainer
from largebatch.hooks import Ema
from largebatch.losses import classification
from largebatch.native import attention
from largebatch.native.attention import choose_attention, describe_attention
from largebatch.ranks.single import Single
from largebatch.replica import Replica
from zoo import volo

CLASSES, BATCH = 3, 16


def make_trainer(num_images: int, *, eval_images: int, hooks: tuple[Hook, ...] = ()) -> Trainer:
    plan = Plan(num_samples=100, global_batch_size=BATCH, micro_batch_size=8, num_images=num_images, seed=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))
    comm, replica = Single(), Replica()
    optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    replica.attach(model, optimizer, comm)

    def batches(of: Plan, start: int):
        for step in range(start, of.num_steps):
            for micro in of.micro_batches(step, 0, 1):
                samples = of.samples(micro.start, micro.stop)[1]
                labels = torch.from_numpy(samples) % CLASSES
                yield Batch(torch.ones(len(labels), 3, 2, 2), labels, micro.step, micro.number, samples)

    trainer = Trainer(
        comm=comm,
        model=model,
        objective=classification,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        learning_rate=lambda plan, step: 0.1,
        plan=plan,
        open_batches=lambda start: batches(trainer.plan, start),
        eval_batches=[next(batches(plan, 0))],
        augment=Augment(CLASSES),
        seed=0,
        precision="fp32",
        clip_norm=None,
        eval_images=eval_images,
        device=torch.device("cpu"),
        replica=replica,
        hooks=hooks,
    )
    return trainer


class Metrics(Hook):
    """Keeps what each evaluation gave."""

    def __init__(self) -> None:
        self.found: list[tuple[int, dict[str, float]]] = []

    def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.found.append((trainer.state.step, metrics))


def test_steps_train_and_evaluations_do_not():
    trainer, modes = make_trainer(2 * BATCH, eval_images=BATCH), []
    trainer.model.register_forward_hook(lambda module, inputs, output: modes.append(module.training))
    trainer.fit()
    assert modes == [True, True, False] * 2  # two passes, and one batch to evaluate


def test_the_training_loss_is_the_mean_over_the_images_since_the_last_evaluation():
    metrics = Metrics()
    trainer = make_trainer(2 * BATCH + 4, eval_images=2 * BATCH, hooks=(metrics,))

    def objective(model, batch):  # the number of the step, for each image
        return 0 * model(batch.images).sum() + len(batch.images) * (trainer.state.step + 1)

    trainer.objective = objective
    trainer.fit()
    assert [(step, found["train_loss"]) for step, found in metrics.found] == [(2, 1.5), (3, 3.0)]


def test_the_layers_follow_the_schedule_each_at_its_part_of_the_rate():
    trainer = make_trainer(2 * BATCH, eval_images=0)
    trainer.optimizer.param_groups[0]["lr_scale"] = 0.25
    trainer.optimizer.param_groups.append(dict(trainer.optimizer.param_groups[0], params=[], lr_scale=1.0))
    trainer.learning_rate = lambda plan, step: 0.1 / (1 + step)
    for step in (1, 2):
        trainer.fit(max_steps=step)
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.25 * 0.1 / step, 0.1 / step]


def test_a_run_without_evaluations():
    """Also one that was stopped in an evaluation, when it still had some."""
    metrics = Metrics()
    trainer = make_trainer(2 * BATCH, eval_images=0, hooks=(metrics,))
    trainer.eval_batches, trainer.state.train_loss = (), 1.0
    trainer.fit()
    assert trainer.complete and not metrics.found


class StopsAt(Hook):
    """Ends the run at a point; the points before each step, and each evaluation, count from 1."""

    def __init__(self, point: int) -> None:
        self.left = point

    def at_point(self, trainer: Trainer) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.stop_reason = "planted"


def test_a_step_that_is_left_was_never_taken():
    """The points are those of two passes, two passes, and here the second pass of the third step."""
    trainers = [make_trainer(3 * BATCH, eval_images=100 * BATCH, hooks=(StopsAt(6),)) for _ in range(2)]
    for trainer in trainers:
        torch.manual_seed(0)
        trainer.model.insert(0, nn.BatchNorm2d(3))
        trainer.model[2].reset_parameters()
        trainer.replica.attach(trainer.model, trainer.optimizer, trainer.comm)
    whole, stopped = trainers
    assert whole.fit(max_steps=2) == "" and stopped.fit() == "planted"
    assert stopped.state == whole.state and stopped.state.step == 2
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(stopped.model.state_dict()[name], tensor), name
    assert all(parameter.grad is None for parameter in stopped.model.parameters())


def test_an_evaluation_that_is_left_is_made_at_the_next_start():
    """It is the last one, so no step follows; its point is the fifth."""
    metrics = Metrics()
    trainer = make_trainer(2 * BATCH, eval_images=2 * BATCH, hooks=(StopsAt(5), metrics))
    assert trainer.fit() == "planted" and trainer.state.step == 2 and not trainer.complete and metrics.found == []
    trainer.stop_reason = ""
    loss = trainer.state.train_loss
    assert trainer.fit() == "" and trainer.complete
    assert [(step, found["train_loss"]) for step, found in metrics.found] == [(2, loss)]
    assert trainer.fit() == "" and len(metrics.found) == 1


def test_a_hook_that_ends_the_run_by_an_evaluation_does_not_lose_it():
    """As examples/hook.py does, before a hook that evaluates the average of the weights."""

    class Ends(Hook):
        def after_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            trainer.stop_reason = "planted"

    metrics = Metrics()
    trainer = make_trainer(4 * BATCH, eval_images=2 * BATCH)
    trainer.hooks = [Ends(), Ema(trainer.model, half_life_images=BATCH), metrics]
    assert trainer.fit() == "planted" and trainer.state.step == 2 and trainer.state.train_loss is None
    assert [step for step, found in metrics.found if "ema_top1" in found] == [2]


def test_all_ranks_pass_the_same_points():
    """The last step has one micro-batch, for the first rank; and the first rank has one batch more to evaluate."""
    trainer, points = make_trainer(2 * BATCH + 8, eval_images=1), []
    trainer.pass_point = points.append
    for rank in (0, 1):
        trainer.comm.data_rank, trainer.comm.data_size = rank, 2
        for step in (1, 2):
            trainer.state.step = step
            jobs = trainer.plan.micro_batches(step, rank, 2)
            batch = trainer.eval_batches[0]
            batches = [dataclasses.replace(batch, step=job.step, number=job.number) for job in jobs]
            assert len(list(trainer.window(iter(batches)))) == len(batches) == (1 if (rank, step) != (1, 2) else 0)
        trainer.eval_batches = [batch] * (3 - rank)
        assert list(trainer._evaluated_batches(3)) == trainer.eval_batches
    assert points[:5] == points[5:] and len(points) == 10


def test_the_phases_of_a_step_have_names():
    trainer = make_trainer(2 * BATCH, eval_images=2 * BATCH)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.fit()
    phases = ("step", "load", "forward", "backward", "synchronize", "optimizer step")
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.name in phases]
    assert names == ["step", *["load", "forward", "backward"] * 2, "synchronize", "optimizer step"] * 2


@pytest.mark.parametrize("interval, steps", [(16, [1, 2, 3, 4]), (32, [2, 4]), (40, [3, 4]), (1000, [4])])
def test_what_is_due_when(interval, steps):
    """After the step that passes a multiple, the one before a short last step included; and at the end."""
    trainer, due, foreseen = make_trainer(3 * BATCH + 4, eval_images=1), [], []
    for step in range(4):
        foreseen += [step + 1] * trainer.due(interval, ahead=True)
        trainer.state.advance(trainer.plan.window_images(step), applied=True)
        due += [trainer.state.step] * trainer.due(interval)
    assert due == foreseen == steps


@pytest.mark.parametrize("interval, steps", [(16, [2, 3, 4, 5]), (40, [4, 5]), (48, [4, 5]), (1000, [5])])
def test_what_is_due_when_in_a_batch_ramp(interval, steps):
    """Steps of 8, 8, 16 and 16 images, and a short one of 4."""
    trainer, due, foreseen = make_trainer(52, eval_images=1), [], []
    trainer.change_phases(((0, 8), (16, BATCH)))
    for step in range(5):
        foreseen += [step + 1] * trainer.due(interval, ahead=True)
        trainer.state.advance(trainer.plan.window_images(step), applied=True)
        due += [trainer.state.step] * trainer.due(interval)
    assert due == foreseen == steps


class Growing(Hook):
    """Doubles the batch after the second step."""

    def after_train_step(self, trainer: Trainer, output: StepOutput) -> None:
        if trainer.state.step == 2:
            trainer.change_phases(((0, 8), (trainer.state.images, BATCH)))


@pytest.mark.parametrize("max_steps, steps", [(0, 4), (5, 4), (3, 3), (2, 2)])
def test_a_run_ends_where_a_changed_plan_says(max_steps, steps):
    """44 images in steps of 8, of which the third has 16 and the fourth the rest; the batches are opened anew."""
    trainer = make_trainer(44, eval_images=10**9, hooks=(Growing(),))
    trainer.change_phases(((0, 8),))
    assert trainer.num_steps == 6
    trainer.fit(max_steps=max_steps)
    assert (trainer.state.step, trainer.state.images) == (steps, [16, 32, 44][steps - 2])
    assert trainer.complete == (steps == 4)


@pytest.mark.parametrize(
    "device, has_bf16, chosen", [("cpu", True, "bf16"), ("cpu", False, "fp32"), ("cuda", True, "bf16"),
                                 ("cuda", False, "fp16")],
)  # fmt: skip
def test_the_precision_that_is_chosen(monkeypatch, device, has_bf16, chosen):
    monkeypatch.setattr(precision, "computes", lambda *_: has_bf16)
    assert precision.choose_precision(torch.device(device)) == chosen


def test_attention_is_fused_on_a_gpu_alone():
    for device, fused in (("cpu", False), ("cuda", True)):
        model = choose_attention(zoo.create_model("vit_ti16", img_size=32), torch.device(device))
        assert {block.attn.fused_attn for block in model.blocks} == {fused}


def vits_and_volos() -> Iterator[tuple[str, nn.Module]]:
    """With heads of 16 and of 24 numbers in the blocks of a VOLO."""
    yield "vit", zoo.create_model("vit_nano32", img_size=64, attn_drop_rate=0.1)
    for dim in (32, 48):
        structure = dataclasses.replace(volo.STRUCTURES["volo_nano"], dims=(32, dim), heads=(2, 2))
        yield str(dim // 2), volo.VOLO(structure, img_size=64, num_classes=CLASSES, drop_path_rate=0.1)


def test_heads_that_attention_in_cpp_does_not_know_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(attention, "available", lambda: True)
    models = {name: choose_attention(model, torch.device("cpu")) for name, model in vits_and_volos()}
    layers = {name: [m for m in model.modules() if isinstance(m, volo.Attention)] for name, model in models.items()}
    taken = {name: [layer.native for layer in found] for name, found in layers.items()}
    assert taken == {"vit": [], "16": [attention.attend] * 3, "24": [None] * 3}
    with torch.autocast("cpu", torch.bfloat16):
        models["24"].forward_train(torch.randn(2, 3, 64, 64))[0].float().sum().backward()


def test_the_log_names_the_attention_of_a_cpu(monkeypatch):
    monkeypatch.setattr(attention, "available", lambda: True)
    cpu, said = torch.device("cpu"), {}
    for name, model in vits_and_volos():
        choose_attention(model, cpu)
        for dtype in (torch.bfloat16, torch.float32):
            said[name, dtype] = describe_attention(model, (2, 3, 64, 64), cpu, dtype)
    assert said.pop(("16", torch.bfloat16)) == "C++ of this project in 3 of 3 layers"
    assert set(said.values()) == {"torch's two products around a softmax"} and len(said) == 5
    assert describe_attention(nn.Linear(2, 2), (2, 3, 64, 64), cpu, torch.float32) == ""


def test_the_log_names_the_kernel_of_fused_attention_that_a_pass_really_takes():
    """On a CPU torch has a flash kernel without dropout, and the formulas with it. Nothing of the model moves."""
    fused, cpu = torch.device("cuda"), torch.device("cpu")
    for name, model in vits_and_volos():
        choose_attention(model, fused)
        drawn, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
        said = describe_attention(model, (4, 3, 64, 64), cpu, torch.bfloat16)
        shapes = {"vit": "math for 2 heads of 16 and 5", "16": "flash attention for 2 heads of 16 and 16"}
        shape = shapes.get(name, "flash attention for 2 heads of 24 and 16")
        assert said == f"torch's scaled_dot_product_attention: {shape} tokens"
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
        with torch.autocast("cpu", torch.bfloat16), profile(activities=[ProfilerActivity.CPU]) as kernels:
            model(torch.randn(4, 3, 64, 64))
        names = {event.name for event in kernels.events()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) == shape.startswith("flash")


def test_a_model_that_cannot_run_without_memory_is_told_later():
    class Reading(nn.Module):
        fused_attn = True

        def forward(self, images: Tensor) -> Tensor:
            return images * float(images.sum())

    said = describe_attention(Reading(), (2, 3, 8, 8), torch.device("cpu"), torch.float32)
    assert said == "that of torch, of a shape that is not known before the first step"
