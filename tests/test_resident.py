"""`benchmark step --data resident`: the trainer's own step on one rank, without Horovod and DALI."""

import csv
import math
import re

import pytest
import torch
from test_benchmark import run_benchmarks

import zoo
from largebatch.assembly import build_augment
from largebatch.benchmark import resident
from largebatch.config import TrainConfig, apply, options
from largebatch.ranks.single import Single

CPU = torch.device("cpu")
SMALL = "--data.micro_batch_size=2 --data.global_batch_size=4 --run.precision=fp32 --horovod.hang_limit_s 0".split()


def test_whole_steps_need_hardly_more_than_torch_and_timm(tmp_path):
    """Token labels, mix-token, a loss scale, LAMB and the average of the weights; timm's model beside it."""
    volo = "step --data resident --model volo_d1 --img-size 32 --optim.name lamb --run.compression fp16 --rounds 1"
    ema = ["--optim.ema_half_life", "1 epochs", "--output", str(tmp_path)]
    printed = run_benchmarks([*volo.split(), *SMALL, *ema])
    assert "training step, volo_d1 at 32 px, fp32, 4 = 1 ranks × 2 micro-batch × 2 passes" in printed
    assert "largebatch takes" in printed and "executed" in printed
    for name in ("largebatch", "timm"):
        assert re.search(rf"^{name}'s step: [\d.]+ % waiting for data, [\d.]+ % optimizer$", printed, re.MULTILINE)
    assert "no reduction" not in printed  # one rank reduces nothing
    (row, _) = csv.DictReader((tmp_path / "step.csv").read_text().splitlines())
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in zoo.create_model("volo_d1", img_size=32).parameters())
    kept = 5 * weights / 2**20  # gradients, two moments and the average are as large
    assert kept < int(row["planned_mib"]) < 1.2 * kept  # two small images add little
    assert f"the plan has {row['planned_mib']} MiB for weights, gradients, optimizer and a pass" in printed


def test_a_step_of_the_only_rank_is_that_of_a_plain_loop():
    """Augmented passes, the mean over the batch, clip, LAMB, the average; a step that is not finite moves nothing."""
    options = "--model vit_nano32 --augment.mixup_alpha 0.2 --optim.clip_norm 0.5 --optim.ema_half_life"
    config = resident.read_config([*options.split(), "1 epochs", *SMALL])
    trainer = resident.build_resident(config, Single(), device=CPU)
    plain = resident.build_resident(config, Single(), device=CPU)
    batches, again = trainer.open_batches(0), list(zip(range(4), plain.open_batches(0)))
    (ema,) = trainer.hooks
    ema.before_fit(trainer)
    outputs = []
    for _ in range(2):
        outputs.append(trainer.train_step(batches))
        ema.after_train_step(trainer, outputs[-1])
    assert [output.applied for output in outputs] == [True, True]

    average = [parameter.detach().clone() for parameter in plain.model.parameters()]
    share = 1 - 0.5 ** (4 / resident.NUM_SAMPLES)
    for number, (_, batch) in enumerate(again):
        plain.state.step = number // 2
        (plain.objective(plain.model, plain.prepare(batch)) / 4).backward()
        if number % 2 == 0:
            continue
        plain.optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        assert torch.allclose(norm, outputs[number // 2].grad_norm, rtol=1e-5) and norm > 0.5
        for group in plain.optimizer.param_groups:
            group["lr"] = plain.lr()
        with plain.optimizer.skip_synchronize():
            plain.optimizer.step()
        plain.optimizer.zero_grad()
        for mean, parameter in zip(average, plain.model.parameters()):
            mean += share * (parameter.detach() - mean)
    for mine, theirs, kept, mean in zip(
        trainer.model.parameters(), plain.model.parameters(), ema.model.parameters(), average
    ):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)  # float32: the clip is applied in another order
        assert torch.allclose(kept, mean, rtol=1e-5, atol=1e-7)

    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    poisoned = (batch._replace(images=batch.images * math.nan) for batch in batches)
    assert not trainer.train_step(poisoned).applied and trainer.state.skipped == 1
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters()))


def test_batches_follow_the_plan_and_have_what_the_recipe_needs():
    config = resident.read_config(["--model", "volo_d1", "--img-size", "32", *SMALL])
    assert config.data.token_labels and config.loss.dense_weight == 0.5 and config.mixes_tokens
    batch = resident.make_batch(config, CPU)
    generator = torch.Generator().manual_seed(0)
    mixed = build_augment(config)(batch.images, batch.labels, generator, batch.token_labels)
    assert mixed.token_targets.shape == (2, 4, 1000) and mixed.mix_box is not None
    assert torch.allclose(mixed.token_targets.sum(dim=2), torch.ones(2, 4))  # the teacher saw each cell


@pytest.mark.parametrize(
    "line, given",
    [
        (
            "--model vit_b16 --img-size=384 --optim.lr 1e-3 --optim.clip_norm null --optim.betas [0.9,0.95]",
            {
                "model.name": "vit_b16", "model.img_size": 384, "optim.lr": 1e-3, "optim.clip_norm": None,
                "optim.betas": (0.9, 0.95),
            },
        ),
        (
            "--run.compile true --run.deterministic=False --schedule.stairs true --run.precision bf16",
            {"run.compile": True, "run.deterministic": False, "schedule.stairs": True, "run.precision": "bf16"},
        ),
        (
            "--data.scale [0.1, 1] --data.mean null --optim.preset paper --parallel.zero 1 --run.end_time null",
            {
                "data.scale": (0.1, 1.0), "data.mean": None, "optim.preset": "paper", "parallel.zero": 1,
                "run.end_time": None,
            },
        ),
        (
            "--data.shuffle_window 0 --horovod.hang_limit_s 0.5 --log.to none --run.seed 7",
            {"data.shuffle_window": 0, "horovod.hang_limit_s": 0.5, "log.to": None, "run.seed": 7},
        ),
        (
            "--parallel.pipeline 3 --parallel.cuts [5,9] --run.end_time 2026-11-21T18:00 --recipe mine",
            {
                "parallel.pipeline": 3, "parallel.cuts": [5, 9], "run.end_time": "2026-11-21T18:00",
                "recipe": "mine",
            },
        ),
    ],
)  # fmt: skip
def test_options_are_read_as_their_types_say(line, given):
    assert options(apply(TrainConfig(), line.replace(", ", ",").split())) == options(TrainConfig()) | given


def test_the_only_rank_refuses_to_share_a_model():
    config = apply(TrainConfig(), ["--parallel.pipeline", "2"])
    with pytest.raises(ValueError, match="replicas of 2 ranks .* the job has 1"):
        Single(shape=config.parallel.shape())


def test_the_only_rank_takes_a_step_if_its_gradient_is_finite():
    weight = torch.nn.Parameter(torch.ones(2))
    model = torch.nn.ParameterList([weight])
    optimizer = Single().wrap(torch.optim.SGD([weight], lr=1.0), model)
    weight.sum().backward()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.synchronize()
    assert optimizer.step_if_finite(scaler, torch.tensor(math.nan)) is False and weight.tolist() == [1.0, 1.0]
    assert optimizer.step_if_finite(scaler, torch.tensor(1.0)) is True and weight.tolist() == [0.0, 0.0]
