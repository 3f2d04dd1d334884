"""Sample order and draws: exact coverage for any number of shards, and torchvision's crop distribution."""

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

import zoo  # noqa: F401  # lets torchvision be imported beside any build of torch
from largebatch.data import order
from largebatch.data.order import Plan

GOLDEN_ORDER = [266, 271, 453, 724, 896, 977, 508, 917, 70, 723]
GOLDEN_UNIFORM = [0.6913196375930831, 0.03797544364219596]
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def sample_stream(plan, num_shards):
    """The samples that all shards together see, step by step and in the order of the micro-batch numbers."""
    stream = []
    for step in range(plan.num_steps):
        micro = [m for shard in range(num_shards) for m in plan.micro_batches(step, shard, num_shards)]
        micro.sort(key=lambda m: m.number)
        assert [m.number for m in micro] == list(range(len(micro)))
        assert all(m.step == step and m.stop > m.start for m in micro)
        stream += [position for m in micro for position in range(m.start, m.stop)]
    return stream


def test_steps_and_windows():
    plan = Plan(num_samples=10, global_batch_size=8, micro_batch_size=3, num_images=20, seed=0)
    assert plan.num_steps == 3
    assert [plan.window_images(step) for step in range(4)] == [8, 8, 4, 0]
    cuts = [(m.step, m.number, m.start, m.stop) for m in plan.micro_batches(1, 0, 1)]
    assert cuts == [(1, 0, 8, 11), (1, 1, 11, 14), (1, 2, 14, 16)]
    assert [m.number for m in plan.micro_batches(0, 1, 2)] == [1]
    assert plan.micro_batches(2, 3, 4) == []  # four images make two micro-batches, so shards 2 and 3 get none
    assert plan.micro_batches(3, 0, 1) == []  # after the end of the run


def test_thirty_two_thousand_recipe():
    plan = Plan(1_281_167, 32_768, 256, 300 * 1_281_167, seed=0)
    assert plan.num_steps == 11_730
    assert plan.window_images(11_729) == 300 * 1_281_167 - 11_729 * 32_768


@pytest.mark.parametrize("trial", range(40))
def test_any_shards_cover_every_position_once(trial):
    rng = random.Random(trial)
    micro = rng.randint(1, 9)
    plan = Plan(rng.randint(1, 50), rng.randint(micro, 60), micro, rng.randint(1, 200), seed=trial)
    for num_shards in (1, 2, 3, 4, rng.randint(5, 20)):
        assert sample_stream(plan, num_shards) == list(range(plan.num_images))


@pytest.mark.parametrize("window", [0, 1, 3])
def test_every_epoch_is_a_permutation_and_epochs_differ(window):
    sizes = (5, 0, 17, 1, 30, 12, 8)
    plan = Plan(sum(sizes), 16, 4, 1000, seed=3, shard_sizes=sizes, shuffle_window=window)
    epochs, samples = plan.samples(0, 4 * sum(sizes))
    assert epochs.dtype == samples.dtype == np.int64
    orders = samples.reshape(4, -1)
    assert (epochs.reshape(4, -1) == np.arange(4)[:, None]).all()
    assert (np.sort(orders, axis=1) == np.arange(sum(sizes))).all()
    assert len({tuple(row) for row in orders}) == 4
    other = Plan(sum(sizes), 16, 4, 1000, seed=4, shard_sizes=sizes, shuffle_window=window)
    assert (other.samples(0, sum(sizes))[1] != orders[0]).any()


@pytest.mark.parametrize("num_samples", [100, 256, 1000])
@pytest.mark.parametrize("repeats", [2, 3, 7])
@pytest.mark.parametrize("num_ranks, micro", [(1, 1), (4, 1), (4, 5), (3, 8)])
def test_repeats_are_those_of_timms_sampler(monkeypatch, num_samples, repeats, num_ranks, micro):
    """With the same permutation, each rank of timm, which drops the last batch if it is short, sees what ours sees."""
    from timm.data.distributed_sampler import RepeatAugSampler

    plan = Plan(num_samples, num_ranks * micro, micro, 3 * num_samples, seed=5, repeats=repeats)
    steps = plan.epoch_images // plan.global_batch_size
    assert steps == (num_samples if num_samples < 256 else num_samples // 256 * 256) // num_ranks // micro
    for epoch in range(2):
        own = torch.from_numpy(order.epoch_order(5, epoch, num_samples).copy())
        monkeypatch.setattr(torch, "randperm", lambda size, generator: own)
        ranks = (RepeatAugSampler(range(num_samples), num_ranks, k, num_repeats=repeats) for k in range(num_ranks))
        theirs = [[*rank][: steps * micro] for rank in ranks]
        monkeypatch.undo()
        for rank in range(num_ranks):
            mine = [plan.micro_batches(step, rank, num_ranks) for step in range(epoch * steps, (epoch + 1) * steps)]
            ours = [plan.samples(job.start, job.stop)[1] for jobs in mine for job in jobs]
            assert np.concatenate(ours).tolist() == theirs[rank]


@pytest.mark.parametrize("window", [0, 2])
def test_each_repetition_has_draws_of_its_own(window):
    """Over three epochs: each image of an epoch three times, and no pair of epoch and image, hence no draw, twice."""
    sizes = (300, 200, 100)
    plan = Plan(600, 64, 16, 1536, seed=1, shard_sizes=sizes, shuffle_window=window, repeats=3)
    assert plan.epoch_images == 512
    epochs, samples = plan.samples(0, 1536)
    assert len({*zip(epochs.tolist(), samples.tolist())}) == 1536
    assert {*(epochs // 3 == np.arange(1536) // 512).tolist()} == {True}
    parts = [plan.samples(m.start, m.stop) for step in range(plan.num_steps) for m in plan.micro_batches(step, 0, 1)]
    assert np.array_equal(np.concatenate(parts, axis=1), np.stack([epochs, samples]))
    once = Plan(600, 64, 16, 1536, seed=1, shard_sizes=sizes, shuffle_window=window)
    first = once.samples(0, 22)[1]  # a step has 64 images: 21 three times, and one more
    assert np.array_equal(np.sort(samples[:64]), np.sort(np.repeat(first, 3)[:64]))
    assert all(len({*samples[k : k + 16].tolist()}) == 16 for k in range(0, 1536, 16))  # four micro-batches in a step
    size = {"width": np.full(1536, 500), "height": np.full(1536, 400)}
    crops = order.draw(1, epochs, samples, **size, scale=SCALE, ratio=RATIO, hflip=0.5)
    assert len({*zip(crops.x[:510].tolist(), crops.y[:510].tolist(), crops.width[:510].tolist())}) > 500


def test_stream_is_a_function_of_the_position():
    plan = Plan(23, 16, 4, 1000, seed=1)
    epochs, samples = plan.samples(0, 230)
    for start, stop in [(0, 1), (20, 30), (5, 100), (229, 230)]:
        assert (plan.samples(start, stop)[0] == epochs[start:stop]).all()
        assert (plan.samples(start, stop)[1] == samples[start:stop]).all()


def test_window_reads_its_files_together():
    sizes = tuple(range(3, 23))
    plan = Plan(sum(sizes), 16, 4, 1000, seed=0, shard_sizes=sizes, shuffle_window=4)
    files = np.repeat(np.arange(20), sizes)[plan.samples(0, sum(sizes))[1]]
    seen = list(dict.fromkeys(files.tolist()))  # in the order of their first sample
    groups = [set(seen[at : at + 4]) for at in range(0, 20, 4)]
    at = 0
    for group in groups:
        count = sum(sizes[file] for file in group)
        assert set(files[at : at + count].tolist()) == group
        at += count
    assert sorted(seen) == list(range(20)) and seen != list(range(20))
    assert (np.diff(files[: sum(sizes[f] for f in groups[0])]) != 0).mean() > 0.4  # and they are mixed


@pytest.mark.parametrize("window", [1, 3, 7, 9])
def test_windowed_order_is_that_of_the_definition(window):
    """In plain Python: sort the files by their words, and the samples of each window of files by theirs."""
    sizes, seed = (5, 0, 17, 1, 30, 12, 8), 5
    plan = Plan(sum(sizes), 16, 4, 1000, seed=seed, shard_sizes=sizes, shuffle_window=window)
    places = iter(range(sum(sizes)))
    samples_of = [[next(places) for _ in range(size)] for size in sizes]
    for epoch in range(3):
        words = np.random.Philox(key=[seed, epoch]).random_raw(len(sizes) + sum(sizes)).tolist()
        files, expected = sorted(range(len(sizes)), key=words.__getitem__), []
        for at in range(0, len(sizes), window):
            inside = [sample for file in files[at : at + window] for sample in samples_of[file]]
            expected += sorted(inside, key=lambda sample: words[len(sizes) + sample])
        assert plan.samples(epoch * sum(sizes), (epoch + 1) * sum(sizes))[1].tolist() == expected


def test_every_file_is_in_the_first_window_as_often_as_any_other():
    sizes, epochs, window = (3,) * 20, 1000, 4
    plan = Plan(sum(sizes), 16, 4, 1000, seed=0, shard_sizes=sizes, shuffle_window=window)
    counts = np.zeros(20)
    for start in range(0, epochs * sum(sizes), sum(sizes)):
        counts[np.unique(plan.samples(start, start + window * 3)[1] // 3)] += 1
    expected = epochs * window / 20
    p = stats.chi2.sf(((counts - expected) ** 2).sum() / expected / (1 - window / 20) * 19 / 20, 19)
    assert counts.sum() == epochs * window and 1e-4 < p < 1 - 1e-4


def mixing_p_value(labels, batch):
    """Of the hypothesis that each batch is a random draw of the balanced classes."""
    classes = labels.max() + 1
    batches = labels[: len(labels) // batch * batch].reshape(-1, batch)
    counts = np.stack([np.bincount(row, minlength=classes) for row in batches])
    statistic = ((counts - batch / classes) ** 2 / (batch / classes)).sum()
    statistic /= 1 - batch / len(labels)  # drawn without replacement
    return stats.chi2.sf(statistic, len(batches) * (classes - 1))


def test_class_sorted_data_is_mixed():
    labels = np.repeat(np.arange(20), 1000)
    plan = Plan(len(labels), 256, 32, len(labels), seed=0)
    p = [mixing_p_value(labels[plan.samples(e * len(labels), (e + 1) * len(labels))[1]], 256) for e in range(3)]
    assert all(1e-4 < value < 1 - 1e-4 for value in p), p
    assert mixing_p_value(labels, 256) < 1e-12  # the test can fail: the order of the files would


def test_numbers_are_fixed_for_ever():
    """A checkpoint holds a position only: another version of anything must give the same order and draws."""
    assert Plan(1000, 10, 10, 10, seed=7).samples(995, 1005)[1].tolist() == GOLDEN_ORDER
    assert order._mix(np.array([1234567], dtype=np.uint64)).tolist() == [6457827717110365317]  # SplitMix64
    draws = order.uniform(7, np.array([0, 3]), np.array([5, 5]), 2)
    assert draws.tolist() == GOLDEN_UNIFORM


def test_uniform_draws():
    samples, epochs = np.arange(20_000), np.zeros(20_000, dtype=np.int64)
    base = order.uniform(1, epochs, samples, 0)
    assert base.min() >= 0 and base.max() < 1
    others = [
        order.uniform(2, epochs, samples, 0),
        order.uniform(1, epochs + 1, samples, 0),
        order.uniform(1, epochs, samples + 1, 0),
        order.uniform(1, epochs, samples, 1),
        order.uniform(1, samples, epochs, 0),  # epoch and sample are no mere sum
    ]
    for draws in (base, *others):
        assert stats.kstest(draws, "uniform").pvalue > 1e-4
    for draws in (*others[:2], others[3]):
        assert abs(np.corrcoef(base, draws)[0, 1]) < 0.04
    assert abs(np.corrcoef(base[1:], base[:-1])[0, 1]) < 0.04
    assert (others[4][1:] != base[1:]).all()


def scalar_crop(u, width, height):
    """The published algorithm, one image at a time, fed with our uniform numbers."""
    for a in range(10):
        area = width * height * (SCALE[0] + (SCALE[1] - SCALE[0]) * u[4 * a])
        log = [math.log(value) for value in RATIO]
        aspect = math.exp(log[0] + (log[1] - log[0]) * u[4 * a + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(u[4 * a + 2] * (width - w + 1)), int(u[4 * a + 3] * (height - h + 1)), w, h
    w, h = width, height
    if width / height < RATIO[0]:
        h = round(width / RATIO[0])
    elif width / height > RATIO[1]:
        w = round(height * RATIO[1])
    return (width - w) // 2, (height - h) // 2, w, h


def test_crops_equal_the_scalar_algorithm():
    rng = np.random.default_rng(0)
    count = 3000
    width, height = np.exp(rng.uniform(0, 7, (2, count))).astype(int)  # 1 to 1096 pixels, also very long ones
    epochs, samples = rng.integers(0, 300, count), rng.integers(0, 1_281_167, count)
    draws = order.draw(5, epochs, samples, width=width, height=height, scale=SCALE, ratio=RATIO, hflip=0.3)
    u = np.stack([order.uniform(5, epochs, samples, number) for number in range(41)])
    expected = np.array([scalar_crop(u[:, k], int(width[k]), int(height[k])) for k in range(count)])
    assert (np.stack([draws.x, draws.y, draws.width, draws.height], axis=1) == expected).all()
    assert (draws.flip == (u[40] < 0.3)).all() and 0.25 < draws.flip.mean() < 0.35
    assert (draws.x >= 0).all() and (draws.y >= 0).all() and draws.x.dtype == np.int32
    assert (draws.x + draws.width <= width).all() and (draws.y + draws.height <= height).all()
    one = order.draw(5, epochs[9:10], samples[9:10], width=width[9:10], height=height[9:10],
                     scale=SCALE, ratio=RATIO, hflip=0.3)  # fmt: skip
    assert (one.x[0], one.y[0], one.flip[0]) == (draws.x[9], draws.y[9], draws.flip[9])


@pytest.mark.parametrize("size", [(500, 375), (60, 300)])
def test_crops_have_torchvisions_distribution(size):
    from torchvision.transforms import RandomResizedCrop

    width, height = size
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    count = 3000
    theirs = np.array([RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(count)])
    samples = np.arange(count)
    ones = np.ones(count, dtype=int)
    draws = order.draw(
        0, 0 * ones, samples, width=width * ones, height=height * ones, scale=SCALE, ratio=RATIO, hflip=0.5
    )
    ours = np.stack([draws.y, draws.x, draws.height, draws.width], axis=1)
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3, column
    areas = [values[:, 2] * values[:, 3] / (width * height) for values in (ours, theirs)]
    assert stats.ks_2samp(*areas).pvalue > 1e-3


def test_padded_crops_are_uniform_and_of_the_images_own_size():
    samples, sizes = np.arange(20_000), np.full(20_000, 32)
    draws = order.draw_padded(3, 0 * samples, samples, width=sizes, height=sizes + 1, padding=4, hflip=0.3)
    assert (draws.width == 32).all() and (draws.height == 33).all()
    assert {a.dtype for a in (draws.x, draws.y, draws.width, draws.height)} == {np.dtype(np.int32)}
    places = np.bincount(9 * (draws.x + 4) + draws.y + 4, minlength=81)  # of both, so they are independent
    assert len(places) == 81 and stats.chisquare(places).pvalue > 1e-3
    assert stats.binomtest(int(draws.flip.sum()), 20_000, 0.3).pvalue > 1e-3
    one = order.draw_padded(3, np.zeros(1), samples[9:10], width=sizes[:1], height=sizes[:1], padding=4, hflip=0.3)
    assert (one.x[0], one.y[0], one.flip[0]) == (draws.x[9], draws.y[9], draws.flip[9])


def test_half_of_the_filters_are_bicubic():
    bicubic = order.draw_bicubic(3, np.zeros(20_000), np.arange(20_000))
    assert stats.binomtest(int(bicubic.sum()), 20_000).pvalue > 1e-3
    flip = order.uniform(3, np.zeros(20_000), np.arange(20_000), order._FLIP) < 0.5
    assert abs(np.corrcoef(bicubic, flip)[0, 1]) < 0.04


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0, 1.15])
def test_evaluation_geometry_is_torchvisions(crop_pct):
    from torchvision.transforms import CenterCrop
    from torchvision.transforms.functional import _compute_resized_output_size

    rng = np.random.default_rng(1)
    width, height = rng.integers(20, 400, (2, 60))
    img_size = 48
    sizes, corners = order.centre_geometry(width, height, img_size=img_size, crop_pct=crop_pct)
    for w, h, size, corner in zip(width.tolist(), height.tolist(), sizes.tolist(), corners.tolist()):
        assert size == _compute_resized_output_size((h, w), [math.floor(img_size / crop_pct)])
        rows, columns = torch.meshgrid(torch.arange(1, size[0] + 1), torch.arange(1, size[1] + 1), indexing="ij")
        rows, columns = (CenterCrop(img_size)(grid) for grid in (rows, columns))
        y, x = rows.argmax(dim=0).max().item(), columns.argmax(dim=1).max().item()  # of the last row and column
        assert corner == [columns.max().item() - 1 - x, rows.max().item() - 1 - y]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"micro_batch_size": 9}, "micro_batch_size 9 is larger than global_batch_size 8"),
        ({"shuffle_window": 2, "shard_sizes": (3, 3)}, "they add up to 6, num_samples is 10"),
        ({"seed": -1}, "must not be negative"),
        ({"repeats": 0}, r"^--augment.repeats is 0, and there are 10 training images: expected 1 up to their"),
        ({"repeats": 11}, "^--augment.repeats is 11, and there are 10 training images"),
        ({"phases": ((1, 4), (5, 8))}, "expected the first at 0, each a whole number of steps"),
        ({"phases": ((0, 4), (6, 8))}, "expected the first at 0, each a whole number of steps"),
        ({"phases": ((0, 4), (4, 16))}, "batches from 1 to global_batch_size 8"),
    ],
)
def test_impossible_plans(change, message):
    plan = {"num_samples": 10, "global_batch_size": 8, "micro_batch_size": 4, "num_images": 20, "seed": 0}
    with pytest.raises(ValueError, match=message):
        Plan(**(plan | change))


def ramp_of(rng: random.Random, micro: int) -> tuple[int, list[tuple[int, int]]]:
    """The end of a random ramp, and its phases, each of some whole steps of a batch that is as good as any."""
    phases, start = [], 0
    for batch in sorted(rng.sample(range(micro, 60), rng.randint(1, 4))):
        phases.append((start, batch))
        start += batch * rng.randint(1, 5)
    return start, phases


@pytest.mark.parametrize("trial", range(40))
def test_a_ramp_cuts_the_same_stream_whole(trial):
    """For any shards, with a short last batch, and also if the run ends inside an earlier phase."""
    rng = random.Random(trial)
    micro = rng.randint(1, 9)
    end, phases = ramp_of(rng, micro)
    length = rng.randint(1, end + 60)
    plan = Plan(rng.randint(1, 50), phases[-1][1], micro, length, seed=trial, phases=tuple(phases))
    plain = Plan(plan.num_samples, phases[-1][1], micro, length, seed=trial)
    for num_shards in (1, 2, 3, rng.randint(5, 20)):
        assert sample_stream(plan, num_shards) == list(range(length))
    assert all((a == b).all() for a, b in zip(plan.samples(0, length), plain.samples(0, length)))
    # Written out: from each place on, steps of the batch there.
    cuts = [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + max(batch for start, batch in phases if start <= cuts[-1])))
    assert [plan.start(step) for step in range(plan.num_steps)] == cuts[:-1]
    assert [plan.window_images(step) for step in range(plan.num_steps + 1)] == [*np.diff(cuts), 0]
    assert set(cuts) >= {start for start, _ in phases if start < length}


def test_a_ramp_of_one_phase_is_none():
    plain = Plan(23, 16, 4, 1001, seed=1)
    ramp = Plan(23, 16, 4, 1001, seed=1, phases=((0, 16),))
    for step in range(plain.num_steps + 1):
        assert ramp.micro_batches(step, 1, 3) == plain.micro_batches(step, 1, 3)
        assert ramp.time(step) == plain.time(step) == step
    assert ramp.num_steps == plain.num_steps


def test_passes_follow_the_phase():
    plan = Plan(100, 24, 4, 200, seed=0, phases=((0, 8), (16, 12), (40, 24)))
    assert [plan.batch_size(step) for step in (0, 1, 2, 3, 4, 99)] == [8, 8, 12, 12, 24, 24]
    assert [plan.passes_in_phase(step, 3) for step in (0, 2, 4)] == [1, 1, 2]
    assert [plan.passes_in_phase(step, 2) for step in (0, 2, 4)] == [1, 2, 3]
    assert [plan.time(step) for step in range(6)] == [0, 1, 2, 3.5, 5, 8]
