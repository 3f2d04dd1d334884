"""The batch ramp: its text, its phases, its learning rate, and mistakes in it."""

import math
import random
from typing import Any

import pytest

from largebatch import assembly
from largebatch import config as configs
from largebatch.config import TrainConfig, ramp
from largebatch.data.order import Plan
from largebatch.recipes import choose

IMAGENET = 1_281_167
RAMP = "1024@0,4096@10 epochs,32768@50 epochs"


class Index:
    """What a plan asks an index for."""

    shard_sizes = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def config_of(text: str, **options: Any) -> TrainConfig:
    """The recipe of ViT-B/32 with a ramp; options: of sections, section_name=value."""
    given = [f"--{name.replace('_', '.', 1)}={value}" for name, value in options.items()]
    argv = ["--model=vit_b32", "--data=synthetic", f"--schedule.batch_ramp={text}", *given]
    return configs.parse(argv, choose_recipe=choose)


def plan_of(config: TrainConfig, num_samples: int = IMAGENET) -> Plan:
    return assembly.build_plan(config, Index(num_samples))


def test_an_epoch_of_repeated_images_has_whole_batches():
    config = config_of("1024@0,32768@10 epochs", augment_repeats=3, schedule_warmup="5 epochs", schedule_stairs="true")
    epoch, plan = IMAGENET // 32768 * 32768, plan_of(config)
    assert (plan.num_images, plan.epoch_images) == (300 * epoch, epoch)
    assert plan.phases == ((0, 1024), (10 * epoch, 32768))
    schedule = assembly.build_schedule(config, plan)
    assert [schedule(k * epoch / 1024) for k in range(6)] == pytest.approx([(1 + k) / 6 for k in range(6)])
    assert schedule(epoch / 1024 - 1) == schedule(0)


@pytest.mark.parametrize("warmup, cooldown", [("1 epochs", "2 epochs"), ("50 %", "50 %")])
@pytest.mark.parametrize("images", [60_000, 50_000, 49_999])
def test_a_warm_up_and_a_cooldown_may_fill_the_run(images, warmup, cooldown):
    options = ["--run.duration=3 epochs", "--data.global_batch_size=4096", "--data.micro_batch_size=512"]
    options += [f"--schedule.warmup={warmup}", f"--schedule.cooldown={cooldown}", "--schedule.name=constant"]
    config = configs.parse(["--model=vit_b32", "--data=synthetic", *options], choose_recipe=choose)
    plan = plan_of(config, images)
    schedule = assembly.build_schedule(config, plan)
    assert schedule(plan.num_steps) == 0.0 and max(map(schedule, range(plan.num_steps))) > 0.5


def test_a_warm_up_and_a_cooldown_that_are_longer_than_the_run_are_named():
    options = ["--run.duration=3 epochs", "--schedule.warmup=2 epochs", "--schedule.cooldown=1.5 epochs"]
    config = configs.parse(["--model=vit_b32", "--data=synthetic", *options], choose_recipe=choose)
    with pytest.raises(ValueError, match="--schedule.warmup is 2 epochs and --schedule.cooldown 1.5 epochs: together"):
        assembly.build_schedule(config, plan_of(config))


def rates(config: TrainConfig, plan: Plan) -> Any:
    """The learning rate as a function of the step."""
    rate = assembly.build_learning_rate(config, plan)
    return lambda step: rate(plan, step)


def test_the_phases_begin_with_the_first_step_at_their_place_or_later():
    plan = plan_of(config_of(RAMP))
    first = math.ceil(10 * IMAGENET / 1024)
    second = math.ceil((50 * IMAGENET - first * 1024) / 4096)
    assert plan.phases == ((0, 1024), (first * 1024, 4096), (first * 1024 + second * 4096, 32768))
    assert [plan.batch_size(step) for step in (0, first - 1, first, first + second)] == [1024, 1024, 4096, 32768]
    assert 0 <= plan.start(first) - 10 * IMAGENET < 1024
    assert 0 <= plan.start(first + second) - 50 * IMAGENET < 4096


@pytest.mark.parametrize(
    "text, expected",
    [
        ("8@0,16@2 epochs", ((0, 8), (200, 16))),
        (" 8@0 , 16 @ 20% ", ((0, 8), (200, 16))),
        ("8@0,12@21 images,16@0.3 epoch", ((0, 8), (24, 12), (36, 16))),
        ("16@0", ((0, 16),)),
        ("8@0,noise", ((0, 8),)),
    ],
)
def test_texts(text, expected):
    config = config_of(text, data_global_batch_size=16, data_micro_batch_size=4, run_duration="10 epochs")
    ramp.check_batches(config, num_ranks=2, resuming=False)
    assert plan_of(config, 100).phases == expected


@pytest.mark.parametrize("rule, power", [("none", 0.0), ("linear", 1.0), ("sqrt", 0.5)])
def test_the_rate_follows_the_batch_and_the_curve_keeps_its_place(rule, power):
    """Warm-up over 20 epochs, across a change of the batch; then linear decay to the end of the run."""
    options = {"schedule_scaling": rule} | ({"schedule_reference_batch_size": 4096} if rule != "none" else {})
    config = config_of(RAMP, schedule_name="linear", schedule_warmup="20 epochs", schedule_stairs="false", **options)
    plan = plan_of(config)
    rate, warmup, end = rates(config, plan), 20 * IMAGENET / 1024, 300 * IMAGENET / 1024
    changes = [step for step in range(1, plan.num_steps) if plan.batch_size(step) != plan.batch_size(step - 1)]
    steps = {0, 1, plan.num_steps - 1, *changes, *(step - 1 for step in changes)}
    for step in steps | {random.Random(0).randrange(plan.num_steps) for _ in range(50)}:
        time = plan.start(step) / 1024
        up, down = (time + 1) / (math.ceil(warmup) + 1), (math.ceil(end) - time) / (math.ceil(end) - math.ceil(warmup))
        factor = (plan.batch_size(step) / 4096) ** power
        assert rate(step) == pytest.approx(config.optim.lr * factor * min(up, down, 1.0), rel=1e-12), step
    assert len(changes) == 2 and 0 < rate(plan.num_steps - 1)


@pytest.mark.parametrize("stairs", ["true", "false"])
def test_the_rate_of_one_phase_is_the_plain_one_to_the_bit(stairs):
    options = {"schedule_scaling": "sqrt", "schedule_reference_batch_size": 4096, "schedule_stairs": stairs}
    plain, one = config_of("", **options), config_of("32768@0", **options)
    of_plain, of_one = (rates(config, plan_of(config)) for config in (plain, one))
    schedule = assembly.build_schedule(plain, plan_of(plain))
    for step in range(plan_of(plain).num_steps):
        assert of_one(step) == of_plain(step) == assembly.peak_lr(plain) * schedule(step)


@pytest.mark.parametrize("stairs", ["true", "false"])
def test_the_rate_of_the_first_phase_is_that_of_a_run_at_its_batch(stairs):
    options = {"schedule_scaling": "sqrt", "schedule_reference_batch_size": 4096, "schedule_stairs": stairs}
    growing, small = config_of(RAMP, **options), config_of("", data_global_batch_size=1024, **options)
    of_growing, of_small = (rates(config, plan_of(config)) for config in (growing, small))
    for step in range(0, 12_000, 7):
        assert of_growing(step) == pytest.approx(of_small(step), rel=1e-12)


@pytest.mark.parametrize(
    "text, options, sentence",
    [
        ("1024", {}, "is '1024': expected phases such as '1024@0,4096@10 epochs,32768@50 epochs', or '1024@0,noise'."),
        ("1024@0,,4096@1 epoch", {}, "expected phases such as"),
        ("-8@0", {}, "expected phases such as"),
        ("noise", {}, "expected phases such as"),
        ("1024@0,2048@1 epoch,noise", {}, "expected phases such as"),
        ("1024@0,4096@soon", {}, "'soon' is no number of epochs, images or %."),
        ("1024@0,4096@10 hours", {}, "'10 hours' is no number of epochs, images or %."),
        ("1024@1 epoch", {}, "its first phase is at 1 epoch, expected '1024@0'."),
        ("4096@0,1024@10 epochs", {}, "1024 comes after 4096, expected a larger batch."),
        ("1024@0,4096@9 steps", {}, "steps may differ in length, so give its places in epochs, images or %"),
        (
            "1024@0,4096@1 epoch",
            {"schedule_warmup": "500 steps"},
            "--schedule.warmup is '500 steps' and --schedule.batch_ramp '1024@0,4096@1 epoch': the steps of a ramp "
            "differ in length, so give epochs, images or %.",
        ),
        ("1024@0,4096@1 epoch", {"run_duration": "500 steps"}, "--run.duration is '500 steps' and"),
        ("1024@0,noise", {"augment.repeats": 3}, "and --augment.repeats 3: micro-batches that share images do not"),
        ("1024@0,noise", {"parallel.tensor.size": 2}, "and --parallel tensor 2: no rank has the gradient of a whole"),
    ],
)
def test_a_text_that_is_no_ramp_is_one_sentence(text, options, sentence):
    with pytest.raises(ValueError) as error:
        config_of(text, **options)
    assert sentence in str(error.value) and str(error.value).count(". ") == 0 and text in str(error.value)


@pytest.mark.parametrize(
    "text, ranks, sentence",
    [
        (
            "1024@0,4096@10 epochs",
            4,
            "--schedule.batch_ramp is '1024@0,4096@10 epochs' and --data.global_batch_size 32768: expected a ramp that "
            "ends at the global batch, so change one of the two.",
        ),
        (
            "1000@0,32768@10 epochs",
            4,
            "its batch of 1000 is not a whole number of micro-batches of 256, at least one for each of 4 ranks; "
            "nearest exact: 1000 = 4 ranks × 250 micro-batch × 1 passes.",
        ),
        ("512@0,32768@10 epochs", 4, "its batch of 512 is not a whole number of micro-batches of 256, at least one"),
        ("256@0,noise", 1, "expected a first batch from 512, two micro-batches, by which the noise scale is measured"),
        ("32768@0,noise", 4, "to less than --data.global_batch_size 32768."),
    ],
)
def test_a_ramp_that_does_not_fit_the_batches_is_one_sentence(text, ranks, sentence):
    with pytest.raises(ValueError) as error:
        ramp.check_batches(config_of(text), num_ranks=ranks, resuming=False)
    assert sentence in str(error.value) and str(error.value).count(". ") == 0


def test_a_resumed_run_may_have_more_ranks_than_its_first_batch_has_micro_batches():
    ramp.check_batches(config_of("512@0,32768@10 epochs"), num_ranks=7, resuming=True)
    with pytest.raises(ValueError, match="its batch of 1000 is not a whole number"):
        ramp.check_batches(config_of("1000@0,32768@10 epochs"), num_ranks=7, resuming=True)


@pytest.mark.parametrize(
    "text, sentence",
    [
        (
            "1024@0,4096@50 epochs,32768@10 epochs",
            "the phase of 32768 is to begin at image 12811670, and the one before it begins at image 64058368, as "
            "steps are not cut: leave one of the two out, or move it.",
        ),
        ("1024@0,4096@0 epochs,32768@1 epoch", "the phase of 4096 is to begin at image 0, and the one before it"),
        ("1024@0,4096@1 image,32768@1024 images", "the phase of 32768 is to begin at image 1024, and the one before"),
        (
            "1024@0,32768@300 epochs",
            "the phase of 32768 begins at image 384350208, and --run.duration '300 epochs' ends at image 384350100: "
            "leave the phase out, move it, or train longer.",
        ),
    ],
)
def test_a_phase_without_a_step_is_one_sentence(text, sentence):
    with pytest.raises(ValueError) as error:
        plan_of(config_of(text))
    assert sentence in str(error.value) and str(error.value).count(". ") == 0 and text in str(error.value)
