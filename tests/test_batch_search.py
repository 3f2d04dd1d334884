"""The search for a batch: its decision for losses that are known, its batches, rates and images."""

from dataclasses import replace

import numpy as np
import pytest

from largebatch import batch_search, find_batch
from largebatch.batch_search import Branch
from largebatch.config import DataConfig, OptimConfig, RunConfig, ScheduleConfig, TrainConfig
from largebatch.data.order import Plan
from largebatch.rate_search import DECAY, smoothed

RATE, STEPS = 0.1, 50  # of the run's batch; of the largest
PLAN = Plan(num_samples=100, global_batch_size=32, micro_batch_size=4, num_images=1600, seed=3)


def quadratic(factor: int, largest: int) -> Branch:
    """SGD on w²/2, whose gradient has the variance 1 / factor, from where it stays at the run's own batch.

    At a rate r the expected loss stays at r / (2 factor (2 - r)), so with r = 0.1 factor at 0.05 / (2 - 0.1 factor).
    """
    lr, square, losses = RATE * factor, RATE / (2 - RATE), []
    for _ in range(STEPS * largest // factor):
        losses.append(square / 2)
        square = (1 - lr) ** 2 * square + lr**2 / factor
    return Branch(16 * factor, lr, losses, smoothed(losses, DECAY ** (factor / largest)))


def test_the_loss_of_a_noisy_quadratic_departs_where_the_formula_says():
    factors = [1, 2, 4, 8, 16, 32]
    branches = [quadratic(factor, 32) for factor in factors]
    for factor, branch in zip(factors[:4], branches):
        # The average forgets the first steps: 0.9^50 of its weight, 0.005.
        assert branch.curve[-1] == pytest.approx(0.05 / (2 - 0.1 * factor), rel=5e-3)
    # 0.0263, 0.0278, 0.0313, 0.0417, 0.125 and no limit; the tolerance is 0.01.
    assert [branch.departs(branches[0]) for branch in branches] == [False, False, False, True, True, True]
    nan = replace(branches[0], curve=[float("nan")])
    assert nan.departs(branches[0]) and branches[0].departs(nan) and nan.departs(nan)


def test_the_same_images_weigh_the_same_in_every_branch():
    steps = np.random.default_rng(0).random(STEPS).tolist()
    for factor in (2, 4, 8):
        finer = [loss for loss in steps for _ in range(factor)]
        assert smoothed(finer, DECAY ** (1 / factor))[-1] == pytest.approx(smoothed(steps, DECAY)[-1], rel=1e-12)


@pytest.mark.parametrize("phases, own, same", [((), 32, 16), (((0, 8), (80, 16), (160, 32)), 16, 3)])
def test_all_branches_see_the_images_of_the_run_in_its_order(phases, own, same):
    """The run is one with its base branch for `same` steps, until its ramp goes on."""
    plan, step = replace(PLAN, phases=phases), 12
    start = plan.start(step)
    expected = plan.samples(start, start + 16 * own)[1].tolist()
    for factor in (1, 2, 4, 8, 16):
        branch = batch_search.branched(plan, step, factor * own, 16 * own)
        assert (branch.start(step), branch.num_steps) == (start, step + 16 // factor)
        assert [branch.start(k) for k in range(step)] == [plan.start(k) for k in range(step)]
        for shards in (1, 2, 3):
            steps, ranks = range(step, branch.num_steps), range(shards)
            parts = [part for k in steps for rank in ranks for part in branch.micro_batches(k, rank, shards)]
            parts.sort(key=lambda part: (part.step, part.number))
            assert [n for part in parts for n in branch.samples(part.start, part.stop)[1].tolist()] == expected
    base, steps = batch_search.branched(plan, step, own, 16 * own), range(step, step + same)
    assert [base.micro_batches(k, 0, 1) for k in steps] == [plan.micro_batches(k, 0, 1) for k in steps]


def test_branches_of_repeated_images_have_the_epochs_of_the_run():
    """An epoch fills whole batches of the run, 1,280,000 images, and not those of the branch."""
    plan, step = Plan(1_281_167, 2048, 256, 400 * 1_280_000, seed=0, repeats=3), 10_000
    start = plan.start(step)
    expected = sorted(plan.samples(start, start + 8192)[1].tolist())
    for batch in (2048, 4096, 8192):
        branch = batch_search.branched(plan, step, batch, 8192)
        assert branch.epoch_images == plan.epoch_images == 1_280_000
        assert sorted(branch.samples(start, start + 8192)[1].tolist()) == expected


def test_the_batches_double_up_to_an_epoch_and_while_they_have_enough_steps():
    choose = batch_search.choose_batches
    assert choose(1024, 10**6, 0) == [1024, 2048, 4096, 8192]
    assert choose(1024, 5000, 0) == [1024, 2048, 4096]
    assert choose(1024, 10**6, 100 * 1024) == choose(1024, 10**6, 199 * 1024) == [1024, 2048]
    assert choose(1024, 10**6, 3200 * 1024) == [1024 * 2**power for power in range(7)]
    with pytest.raises(ValueError, match="--images is 102399: expected at least 102400, which are 50 steps of 2048"):
        choose(1024, 10**6, 102399)
    with pytest.raises(ValueError, match="twice that is more than the 2047 training images: .* is at most 1023"):
        choose(1024, 2047, 0)


@pytest.mark.parametrize(
    "optimizer, rule, factor",
    [("sgd", "none", 4), ("lamb", "none", 2), ("lars", "none", 2), ("adamw", "linear", 4), ("sgd", "sqrt", 2)],
)
def test_the_rate_follows_the_rule_of_the_run_or_that_of_its_optimizer(optimizer, rule, factor):
    schedule = ScheduleConfig(scaling=rule, reference_batch_size=0 if rule == "none" else 512)
    config = TrainConfig(optim=OptimConfig(name=optimizer), schedule=schedule)
    assert batch_search.scaled(config, 0.3, 4096, 1024) == pytest.approx(0.3 * factor, rel=1e-15)
    assert batch_search.scaled(config, 0.3, 1024, 1024) == 0.3


def test_the_result_is_one_sentence(tmp_path, caplog):
    caplog.set_level("INFO")
    config = TrainConfig(run=RunConfig(folder=str(tmp_path)), data=DataConfig(global_batch_size=1024))

    def told(*ends: float) -> str:
        found = [Branch(1024 * 2**k, 0.1, [3.0, end], [3.0, end]) for k, end in enumerate(ends)]
        batch_search.tell(config, found, 10_000)
        return caplog.messages[-1]

    files = f"{tmp_path}/find_batch.csv and find_batch.png have the curves."
    departs = "the loss departs between 2,048 and 4,096: it ends 0.25 above that of the run's batch of 1,024; "
    assert told(2.0, 2.0, 2.25) == departs + files
    assert told(2.0, 2.0) == f"the loss does not depart up to 2,048: --images 204800 tries 4,096, too; {files}"
    beyond = "the loss does not depart up to 8,192: 16,384 are more than the 10,000 training images; "
    assert told(2.0, 2.0, 1.0, 2.01) == beyond + files
    assert told(2.0, float("nan")).startswith("the loss departs between 1,024 and 2,048: it ends nan above")
    assert (tmp_path / "find_batch.png").stat().st_size > 10_000


def test_mistakes_are_one_sentence(tmp_path):
    for given in ("many", "0", "-3", "nan", "inf"):
        with pytest.raises(ValueError, match=f"--images is '{given}': expected a number of images, such as 400000"):
            find_batch.read([f"--images={given}"])
    assert find_batch.read(["--images", "4e5", "--optim.lr", "1"]) == (["--optim.lr", "1"], None, 400_000)
    with pytest.raises(ValueError, match="is not a run folder: expected a config.yaml in it"):
        find_batch.read([str(tmp_path)])
    (tmp_path / "config.yaml").touch()
    words, place, number = find_batch.read([str(tmp_path / "checkpoints" / "00000007"), "--run.seed", "1"])
    assert words == ["--config", f"{tmp_path}/config.yaml", "--run.folder", str(tmp_path), "--run.seed", "1"]
    assert (place, number) == (tmp_path / "checkpoints" / "00000007", 0)
    for there in (place, tmp_path):
        with pytest.raises(ValueError, match=f"{there} has no checkpoint, and the branches begin at one: give a run"):
            find_batch.newest_step(there)
