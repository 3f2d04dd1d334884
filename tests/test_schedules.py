"""Schedules against tables written by hand, the published 32K curve, and timm's scheduler."""

import math

import pytest
import torch

import zoo  # noqa: F401  lets timm be imported beside torch's CPU build
from largebatch.schedules import make_schedule, scale_lr

TABLES = {
    "linear, the 32K form": (
        dict(name="linear", total_steps=10, warmup_steps=4),
        [
            (0, 1 / 5),  # first step: not zero
            (1, 2 / 5),
            (3, 4 / 5),  # last of the warm-up
            (4, 1.0),  # the peak, once
            (5, 5 / 6),
            (9, 1 / 6),  # last of the run: not zero
            (10, 0.0),  # past the end
            (99, 0.0),
        ],
    ),
    "linear without warm-up": (dict(name="linear", total_steps=4), [(0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0)]),
    "linear with start, floor and cooldown": (
        dict(name="linear", total_steps=10, warmup_steps=2, start=0.1, floor=0.2, cooldown_steps=4),
        [
            (0, 0.1),  # start
            (1, 0.55),  # half way from start to the peak
            (2, 1.0),  # peak
            (3, 0.8),
            (4, 0.6),  # half way from peak to floor
            (5, 0.4),
            (6, 0.2),  # cooldown begins at the floor
            (9, 0.2),
            (10, 0.2),  # and stays there
        ],
    ),
    "linear, not prefixed": (
        dict(name="linear", total_steps=10, warmup_steps=4, start=0.0, prefix=False),
        [(0, 0.0), (2, 0.5), (4, 0.6), (5, 0.5), (9, 0.1)],  # decay counted from step 0, so the peak is never reached
    ),
    "cosine": (
        dict(name="cosine", total_steps=8),
        [(0, 1.0), (2, 0.5 + math.sqrt(2) / 4), (4, 0.5), (6, 0.5 - math.sqrt(2) / 4), (8, 0.0)],  # a quarter  # half
    ),
    "cosine, prefixed, with floor": (
        dict(name="cosine", total_steps=6, warmup_steps=2, floor=0.1),
        [(0, 1 / 3), (1, 2 / 3), (2, 1.0), (4, 0.55), (6, 0.1)],  # 0.55: half way from 1 to 0.1
    ),
    "constant": (dict(name="constant", total_steps=6, warmup_steps=1), [(0, 0.5), (1, 1.0), (5, 1.0), (6, 1.0)]),
    "constant with cooldown": (
        dict(name="constant", total_steps=6, floor=0.1, cooldown_steps=2),
        [(0, 1.0), (3, 1.0), (4, 1.0), (5, 0.55), (6, 0.1), (99, 0.1)],
    ),
    "warm-up to the end": (dict(name="linear", total_steps=2, warmup_steps=2), [(0, 1 / 3), (1, 2 / 3), (2, 0.0)]),
    "stairs": (
        dict(name="linear", total_steps=12, warmup_steps=6, steps_per_epoch=3.0),
        [
            (0, 1 / 3),  # epoch 0 of 4: (0 + 1) / (2 + 1)
            (2, 1 / 3),
            (3, 2 / 3),  # epoch 1
            (6, 1.0),  # epoch 2: the peak
            (8, 1.0),
            (9, 0.5),  # epoch 3: (4 - 3) / (4 - 2)
            (11, 0.5),
            (12, 0.0),
        ],
    ),
    "stairs of a fractional length": (
        dict(name="linear", total_steps=10, steps_per_epoch=2.5),
        [(0, 1.0), (2, 1.0), (3, 0.75), (4, 0.75), (5, 0.5), (7, 0.5), (8, 0.25), (9, 0.25)],
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_hand_written_table(table):
    options, entries = TABLES[table]
    schedule = make_schedule(**options)
    for step, expected in entries:
        assert schedule(step) == pytest.approx(expected, abs=1e-12), f"{table}, step {step}"


def test_published_32k_curve_per_epoch():
    """300 epochs of ImageNet at 32,768: up (e + 1) / 151 for 150 epochs, then down (300 - e) / 150."""
    steps_per_epoch = 1281167 / 32768
    total, warmup = math.ceil(300 * steps_per_epoch), round(150 * steps_per_epoch)
    options = dict(total_steps=total, warmup_steps=warmup, steps_per_epoch=steps_per_epoch)
    schedule = make_schedule("linear", **options)
    assert (total, warmup) == (11730, 5865)
    for step in range(total):
        epoch = int(step / steps_per_epoch)
        expected = (epoch + 1) / 151 if epoch < 150 else (300 - epoch) / 150
        assert schedule(step) == pytest.approx(expected, abs=1e-12)


def test_a_step_that_begins_an_epoch_has_its_rate():
    """Step 31,250 of 48 images begins epoch 30 of 50,000; 31,250 / (50,000 / 48) is less in floating point."""
    schedule = make_schedule("linear", total_steps=62_500, steps_per_epoch=50_000 / 48)
    assert [schedule(step) for step in (31_249, 31_250, 31_251)] == pytest.approx([31 / 60, 0.5, 0.5])


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("epochs", [False, True])
def test_equals_timm_cosine(prefix, epochs):
    from timm.scheduler import CosineLRScheduler

    decay, warmup, cooldown, start, floor, unit = 40, 5, 4, 0.02, 0.1, 3 if epochs else 1
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = CosineLRScheduler(
        optimizer, t_initial=decay, warmup_t=warmup, warmup_lr_init=start, lr_min=floor, warmup_prefix=prefix
    )
    total = decay + cooldown + (warmup if prefix else 0)
    ours = make_schedule(
        "cosine",
        total_steps=total * unit,
        warmup_steps=warmup * unit,
        start=start,
        floor=floor,
        cooldown_steps=cooldown * unit,
        prefix=prefix,
        steps_per_epoch=unit if epochs else None,
    )
    for step in range(total * unit):
        theirs.step(step // unit)
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), f"step {step}"


def test_a_late_rate_is_that_of_an_epoch_before():
    options = dict(total_steps=60, warmup_steps=9, start=0.1, floor=0.2, prefix=False, steps_per_epoch=3.0)
    plain, late = make_schedule("cosine", **options), make_schedule("cosine", **options, late=1)
    assert [late(step) for step in range(60)] == [plain(max(0, step - 3)) for step in range(60)]


@pytest.mark.parametrize("unit", [None, 3.0])
def test_a_constant_rate_and_a_cooldown_are_warm_up_stable_decay(unit):
    """The formula of that schedule with a linear decay, written out for 4, 10 and 6 steps or epochs."""
    steps = 1 if unit is None else 3
    schedule = make_schedule(
        "constant", total_steps=20 * steps, warmup_steps=4 * steps, start=0.0, floor=0.1, cooldown_steps=6 * steps,
        steps_per_epoch=unit,
    )  # fmt: skip
    for step in range(22 * steps):
        t = step // steps
        expected = t / 4 if t < 4 else 1.0 if t < 14 else 1 - 0.9 * (t - 14) / 6 if t < 20 else 0.1
        assert schedule(step) == pytest.approx(expected, abs=1e-12)


def test_same_rate_at_the_same_fraction_of_data():
    """Twice the batch halves all steps; the factor at a fraction of the data moves by less than one step."""
    for size in (1, 2, 4):
        schedule = make_schedule("cosine", total_steps=4000 // size, warmup_steps=1000 // size, start=0.0)
        for fraction, expected in ((0.125, 0.5), (0.25, 1.0), (0.625, 0.5)):
            assert schedule(int(fraction * 4000 / size)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(name="step", total_steps=5), "unknown schedule 'step'; choose one of linear, cosine"),
        (dict(name="linear", total_steps=0), "total_steps >= 1"),
        (dict(name="linear", total_steps=5, warmup_steps=4, cooldown_steps=2), "4 \\+ 2 is longer than"),
        (dict(name="linear", total_steps=5, start=0.1), "--schedule.start is 0.1, without a warm-up: give"),
        (dict(name="linear", total_steps=5, warmup_steps=1, start=2.0), "--schedule.start is 2.0: expected a share"),
        (dict(name="linear", total_steps=5, floor=-0.1), "--schedule.floor is -0.1: expected a share"),
        (dict(name="constant", total_steps=5, floor=0.1), "--schedule.floor is 0.1 and --schedule.name constant: give"),
        (dict(name="linear", total_steps=5, steps_per_epoch=0.0), "steps_per_epoch must be above 0"),
    ],
)
def test_refuses(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_schedule(**options)


def test_scale_lr():
    assert scale_lr(0.1, batch_size=1024, reference_batch_size=256) == 0.1
    assert scale_lr(0.1, batch_size=1024, reference_batch_size=256, rule="linear") == pytest.approx(0.4)
    assert scale_lr(0.1, batch_size=1024, reference_batch_size=256, rule="sqrt") == pytest.approx(0.2)
    assert scale_lr(0.1, batch_size=64, reference_batch_size=256, rule="sqrt") == pytest.approx(0.05)
    with pytest.raises(ValueError, match="unknown learning-rate rule 'log'; choose one of none"):
        scale_lr(0.1, batch_size=64, reference_batch_size=256, rule="log")
    with pytest.raises(ValueError, match="must be positive"):
        scale_lr(0.1, batch_size=0, reference_batch_size=256, rule="linear")
