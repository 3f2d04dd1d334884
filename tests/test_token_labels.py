"""Label maps from the record to the loss: bytes, geometry, targets and the objective, each against a plain reference.

The reference of the geometry is torchvision's own ROI-align in Python, fed as the published code feeds it, and where
that has no answer (outside of what the teacher saw, under a warp) loops over points in float64.
"""

import functools
import inspect
import io
import math
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import stats
from torch import nn
from torch._dynamo.utils import counters

from largebatch import assembly, augment, config, losses
from largebatch.augment import Augment, Augmented, draw_mix_box, one_hot
from largebatch.data import index_file, label_maps, records, token_labels
from largebatch.data.dali import TrainLoader
from largebatch.data.order import Draws, Plan
from largebatch.data.randaugment import AutoAugment
from largebatch.data.scan import index_shards
from largebatch.data.token_labels import TokenLabels, place
from zoo import _torchvision  # noqa: F401  (makes torchvision importable beside a CPU build of torch)
from zoo.volo import VOLO, Structure

import torchvision.ops.roi_align  # noqa: F401  # isort: skip

CLASSES = 12
MAP = (5, 18, 18)


def random_map(rng, shape=MAP, num_classes=CLASSES):
    """Scores and classes as a teacher gives them: k different classes in each cell, the highest first."""
    k, height, width = shape
    ids = rng.permuted(np.tile(np.arange(num_classes)[:, None, None], (1, height, width)), axis=0)[:k]
    return -np.sort(-rng.normal(4, 3, shape), axis=0).astype(np.float16), ids


def random_draws(rng, sizes, *, whole=False):
    """Crops anywhere in images of `sizes` (n, 2), width and height; flipped or not."""
    low, high = np.sort(rng.uniform(0, 1, (2, len(sizes), 2)), axis=0)
    low, high = low * 0.6, 0.4 + high * 0.6
    corner = np.zeros_like(sizes) if whole else np.floor(low * sizes).astype(np.int32)
    size = sizes if whole else np.ceil(high * sizes).astype(np.int32) - corner
    return Draws(*corner.T, *size.T, rng.uniform(size=len(sizes)) < 0.5)


def batch_of_maps(rng, count, shape=MAP):
    scores, ids = zip(*(random_map(rng, shape) for _ in range(count)))
    return torch.from_numpy(np.stack(ids)).int(), torch.from_numpy(np.stack(scores))


def dense(ids, scores):
    """The maps with all classes, float64 (B, K, h, w)."""
    maps = torch.zeros(len(ids), CLASSES, *ids.shape[2:], dtype=torch.float64)
    return maps.scatter_(1, ids.long(), scores.double())


def sampled(labels, grid):
    """Scores (B, K, grid, grid) by our weights, and what was seen."""
    weights, seen = token_labels.cell_weights(labels, grid=grid)
    scores = weights.double() @ dense(labels.ids, labels.scores).flatten(2).transpose(1, 2)
    return scores.transpose(1, 2).unflatten(2, (grid, grid)), seen.unflatten(1, (grid, grid))


# -- in the record ---------------------------------------------------------------------------------------------------


def jpeg(width, height, pixels=None):
    file = io.BytesIO()
    image = Image.fromarray(pixels) if pixels is not None else Image.new("RGB", (width, height), (90, 60, 30))
    image.save(file, "JPEG", quality=98, subsampling=0)
    return file.getvalue()


def write(path, images, maps):
    """A TFRecord file with the features that packing writes, and maps where there are any."""
    payloads = []
    for k, (image, found) in enumerate(zip(images, maps)):
        features = {records.IMAGE: [image], records.LABEL: [1 + k % CLASSES], records.FILENAME: [b"a_1.JPEG"]}
        payloads.append(records.encode_example(features | dict(label_maps.encode_map(*found) if found else {})))
    records.write_records(path, payloads)
    return index_shards([str(path)])


def loader(index, *, maps=True, img_size=64, **changes):
    plan = Plan(len(index), len(index), len(index), len(index), seed=3)
    options = {"mean": (0, 0, 0), "std": (1, 1, 1), "interpolation": "bilinear", "scale": (0.08, 1), "hflip": 0.5}
    options |= {"ratio": (3 / 4, 4 / 3), "device": torch.device("cpu"), "num_threads": 1} | changes
    return closing(TrainLoader(index, plan, shard=0, num_shards=1, img_size=img_size, with_maps=maps, **options))


def test_maps_come_out_of_the_loader_as_they_were(tmp_path):
    rng = np.random.default_rng(0)
    maps = [(scores, ids + 60_000) for scores, ids in (random_map(rng, (3, 5, 7)) for _ in range(24))]
    index = write(tmp_path / "train-a", [jpeg(40 + k, 30) for k in range(24)], maps)
    index_file.save(index, tmp_path / "index.npz")
    kept = index_file.load(tmp_path / "index.npz").without([3, 8])
    kept.check_maps(60_000 + CLASSES)
    with loader(kept.number_labels(num_classes=CLASSES), img_size=16) as batches:
        batch = next(batches)
    numbers = np.delete(np.arange(24), [3, 8])[batch.samples]
    for name, part in (("scores", 0), ("ids", 1)):
        found = getattr(batch.token_labels, name).numpy()
        assert np.array_equal(found, np.stack([maps[k][part] for k in numbers]))
    assert batch.token_labels.ids.dtype == torch.int32 and batch.token_labels.scores.dtype == torch.float16
    with loader(kept.number_labels(num_classes=CLASSES), maps=False, img_size=16) as batches:
        again = next(batches)
    assert again.token_labels is None and torch.equal(again.images, batch.images)


def test_a_map_before_its_image_is_read_too(tmp_path):
    rng = np.random.default_rng(0)
    found = random_map(rng)
    last = records.encode_example({records.IMAGE: [jpeg(30, 20)], records.LABEL: [1]})
    records.write_records(tmp_path / "train-a", [records.encode_example(label_maps.encode_map(*found)) + last])
    index = index_shards([str(tmp_path / "train-a")]).number_labels(num_classes=1)
    with loader(index, img_size=16) as batches:
        labels = next(batches).token_labels
    assert np.array_equal(labels.scores[0], found[0]) and np.array_equal(labels.ids[0], found[1])


@pytest.mark.parametrize(
    "broken, words",
    [
        ([None] * 1201, "labels for 1,201 images expected, 0 found, first missing .*train-a, record 0 "),
        ([(0, 1, 2)] * 1200 + [None], "labels for 1,201 images expected, 1,200 found, first missing .*record 1200 "),
        ([(0, 1, 2)] * 5 + [(0, 1, 3)], r"different shapes: \[1, 1, 2\] in .*record 0 .*\[1, 1, 3\] in .*record 5 "),
        ([(11, 1, 2)], "have class 11, the model 11 classes"),
        ([(11, 0, 2)], "1 images expected, 0 found"),
    ],
)
def test_what_is_missing_is_found_at_the_start(tmp_path, broken, words):
    image = jpeg(8, 8)
    maps = [m and (np.ones((1, *m[1:])), np.full((1, *m[1:]), m[0])) for m in broken]
    if broken == [(11, 0, 2)]:  # a shape that is not that of the bytes
        features = label_maps.encode_map(np.ones((1, 1, 2)), np.ones((1, 1, 2))) | {label_maps.SHAPE: [1, 1, 3]}
        payload = records.encode_example({records.IMAGE: [image], records.LABEL: [1]} | features)
        records.write_records(tmp_path / "train-a", [payload])
        index = index_shards([str(tmp_path / "train-a")])
    else:
        index = write(tmp_path / "train-a", [image] * len(maps), maps)
    with pytest.raises(ValueError, match=words):
        index.check_maps(CLASSES - 1)


def test_what_no_record_can_hold_is_refused():
    for scores, ids, words in ((math.inf, 0, "not finite"), (1e6, 0, "not finite"), (1, 2**16, "65536, expected")):
        with pytest.raises(ValueError, match=words), np.errstate(over="ignore"):
            label_maps.encode_map(np.full((1, 1, 1), scores), np.full((1, 1, 1), ids))


# -- geometry --------------------------------------------------------------------------------------------------------


def published(maps, draws, sizes, *, grid):
    """What the published code does, with rows and columns in their places: flip image and map, then ROI-align a box."""
    width, height = sizes.T.astype(float)
    flip = torch.from_numpy(draws.flip)
    left = np.where(draws.flip, width - draws.x - draws.width, draws.x)
    rows, columns = (draws.y / height, draws.height / height), (left / width, draws.width / width)
    boxes = np.stack([columns[0], rows[0], columns[0] + columns[1], rows[0] + rows[1]], axis=1)
    maps = torch.where(flip[:, None, None, None], maps.flip(3), maps)
    numbers = torch.arange(len(maps), dtype=torch.float64)[:, None]
    boxes = torch.cat([numbers, torch.from_numpy(boxes) * maps.shape[3] - 0.5], dim=1)
    in_python = inspect.unwrap(sys.modules["torchvision.ops.roi_align"]._roi_align)  # not compiled, as it asks for
    return in_python(maps, boxes, 1.0, grid, grid, -1, False)


@pytest.mark.parametrize("grid", [1, 4, 7, 12])
@pytest.mark.parametrize("whole", [False, True])
def test_crops_equal_torchvisions_roi_align(grid, whole):
    """Flipped or not, for square images, where the map shows all of the image."""
    rng = np.random.default_rng(grid)
    sizes = rng.integers(200, 500, (16, 2))
    sizes[:, 1] = sizes[:, 0]
    draws = random_draws(rng, sizes, whole=whole)
    ids, scores = batch_of_maps(rng, len(sizes), (5, 9, 9))
    placement = place(draws, width=sizes[:, 0], height=sizes[:, 1])
    ours, seen = sampled(TokenLabels(ids, scores, torch.from_numpy(placement)), grid)
    reference = published(dense(ids, scores), draws, sizes, grid=grid)
    # crop, then flip, is the same as flip, then crop of the mirrored window
    assert draws.flip.any() and not draws.flip.all()
    assert seen.all()
    torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6 * float(reference.abs().max()))


def by_loops(maps, draws, sizes, *, grid, most, steps=None):
    """The definition, point by point; scores (B, K, grid, grid) and which cells were seen."""
    count, _, height, width = maps.shape
    scores, seen = torch.zeros(count, CLASSES, grid, grid, dtype=torch.float64), torch.zeros(count, grid, grid).bool()
    for b in range(count):
        side = min(sizes[b])
        befores = [np.concatenate([step, [[0, 0, 1]]]) for step in ([] if steps is None else steps[b])]
        before = functools.reduce(np.matmul, befores, np.eye(3))
        window = np.array([[draws.width[b], 0, draws.x[b]], [0, draws.height[b], draws.y[b]], [0, 0, 1]])
        mirror = np.array([[-1, 0, 1], [0, 1, 0], [0, 0, 1]]) if draws.flip[b] else np.eye(3)
        spare = (sizes[b] - side) / 2
        square = np.array([[1 / side, 0, -spare[0] / side], [0, 1 / side, -spare[1] / side], [0, 0, 1]])
        whole = square @ window @ mirror @ before
        cells = np.abs(whole[:2, :2]) * [[width], [height]]
        number = np.clip(np.ceil(cells.max(axis=0) / grid), 1, most).astype(int)
        for row in range(grid):
            for column in range(grid):
                found = []
                for j in range(number[1]):
                    for i in range(number[0]):
                        point = [(column + (i + 0.5) / number[0]) / grid, (row + (j + 0.5) / number[1]) / grid, 1]
                        x, y, _ = whole @ point
                        shown = [x, y]
                        for step in befores[::-1]:
                            point = step @ point
                            shown += [*point[:2]]
                        if min(shown) >= 0 and max(shown) <= 1:
                            found.append(bilinear(maps[b], x * width - 0.5, y * height - 0.5))
                if found:
                    scores[b, :, row, column], seen[b, row, column] = torch.stack(found).mean(dim=0), True
    return scores, seen


def bilinear(one, x, y):
    x, y = min(max(x, 0), one.shape[2] - 1), min(max(y, 0), one.shape[1] - 1)
    left, top = min(int(x), one.shape[2] - 2), min(int(y), one.shape[1] - 2)
    x, y = x - left, y - top
    upper = (1 - x) * one[:, top, left] + x * one[:, top, left + 1]
    return (1 - y) * upper + y * ((1 - x) * one[:, top + 1, left] + x * one[:, top + 1, left + 1])


def rotations(rng, count):
    """Rotation about the centre and shear, as (count, 2, 3)."""
    angle, shear = rng.uniform(-0.6, 0.6, (2, count))
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], axis=-1).reshape(-1, 2, 2)
    turn = turn @ np.stack([np.ones(count), shear, np.zeros(count), np.ones(count)], axis=-1).reshape(-1, 2, 2)
    shift = 0.5 - turn @ np.array([0.5, 0.5]) + rng.uniform(-0.2, 0.2, (count, 2))
    return np.concatenate([turn, shift[:, :, None]], axis=2)


@pytest.mark.parametrize("grid", [1, 5])
@pytest.mark.parametrize("warped", [False, True])
def test_what_the_teacher_did_not_see_does_not_count(grid, warped):
    """Wide and high images, of which the teacher saw the centre; a map that is no square; empty corners of a warp."""
    rng = np.random.default_rng(7)
    sizes = np.array([[500, 375], [300, 700], [900, 150], [333, 334]] * 3)
    draws, (ids, scores) = random_draws(rng, sizes), batch_of_maps(rng, len(sizes), (5, 9, 13))
    steps = np.stack([rotations(rng, len(sizes)) for _ in range(3)], axis=1) if warped else None
    warp = token_labels.warps(steps) if warped else None
    placement = torch.from_numpy(place(draws, width=sizes[:, 0], height=sizes[:, 1], warp=warp))
    labels = TokenLabels(ids, scores, placement, None if warp is None else torch.from_numpy(warp))
    ours, seen = sampled(labels, grid)
    expected, seen_by_loops = by_loops(dense(ids, scores), draws, sizes, grid=grid, most=-(-13 // grid), steps=steps)
    assert torch.equal(seen, seen_by_loops)
    assert grid == 1 or 0.1 < seen.float().mean() < 0.9
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    probabilities, again = token_labels.targets(labels, num_classes=CLASSES, grids=[grid])
    assert torch.equal(again.view(seen.shape), seen)
    softmax = expected.softmax(dim=1).flatten(2).transpose(1, 2) * seen.view(len(ids), -1, 1)
    torch.testing.assert_close(probabilities, softmax.float(), rtol=0, atol=1e-6)


def test_no_warp_is_the_identity():
    rng = np.random.default_rng(1)
    sizes = np.array([[500, 375], [300, 700]])
    draws, (ids, scores) = random_draws(rng, sizes), batch_of_maps(rng, 2)
    identity = token_labels.warps(np.tile(np.eye(2, 3), (2, 4, 1, 1)))
    placement = place(draws, width=sizes[:, 0], height=sizes[:, 1])
    same = place(draws, width=sizes[:, 0], height=sizes[:, 1], warp=identity)
    np.testing.assert_array_equal(placement, same)
    without = TokenLabels(ids, scores, torch.from_numpy(placement))
    ours, theirs = (sampled(labels, 14) for labels in (without, without._replace(warp=torch.from_numpy(identity))))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def coordinates(height, width):
    """Centres of cells in the unit square, (height, width, 2), x and y."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(x + 0.5) / width, (y + 0.5) / height], axis=-1)


WARPS = AutoAugment(((("rotate", 1.0, 9), ("shear_x", 0.7, 7)), (("translate_x", 1.0, 9), ("shear_y", 0.7, 9))))


@pytest.mark.parametrize("policy", [None, WARPS], ids=["plain", "warped"])
def test_image_and_map_are_cut_alike_by_the_loader(tmp_path, policy):
    """Red and green of each pixel are where it is, and so are the scores of two classes in the teacher's square.

    Blue is 0 only where a warp left nothing.
    """
    rng, images, maps, sizes = np.random.default_rng(5), [], [], []
    for k in range(32):
        width, height = rng.integers(120, 400, 2) if k % 4 else (200, 200)
        where = coordinates(height, width)
        pixels = np.concatenate([np.rint(255 * where), np.full((height, width, 1), 128)], axis=2).astype(np.uint8)
        images.append(jpeg(width, height, pixels))
        maps.append((coordinates(12, 18).transpose(2, 0, 1), np.tile(np.array([[[0]], [[1]]]), (1, 12, 18))))
        sizes.append((width, height))
    index = write(tmp_path / "train-a", images, maps).number_labels(num_classes=CLASSES)
    with loader(index, img_size=96, policy=policy) as batches:
        batch = next(batches)
    size = torch.tensor(sizes)[batch.samples].double()
    side = size.amin(dim=1, keepdim=True)
    shown = F.avg_pool2d(batch.images[:, :2], 16).double().flatten(2).transpose(1, 2) * size[:, None]
    in_square = (shown - (size - side)[:, None] / 2) / side[:, None]
    targets, seen = token_labels.targets(batch.token_labels, num_classes=CLASSES, grids=[6])
    scores = (targets[:, :, :2] / targets[:, :, 2:3]).log()  # the third class has the score 0
    margin = 1 / 12  # nearer to the border scores do not change any more, and points do not count
    blue = F.avg_pool2d(batch.images[:, 2:], 16).flatten(1)
    inside = ((in_square > margin) & (in_square < 1 - margin)).all(dim=2) & (blue > 0.495)
    assert 300 < inside.sum() < inside.numel() - 100 and seen[inside].all()
    outside = ((in_square < -margin) | (in_square > 1 + margin)).any(dim=2) & (blue > 0.495)
    assert not seen[outside | (blue < 0.005)].any() and (policy is None or (blue < 0.005).sum() > 50)
    assert (scores.double() - in_square)[inside].abs().max() < 0.02


# -- targets ---------------------------------------------------------------------------------------------------------


def labels_for(count, rng, *, unseen=()):
    """Token labels of full square images, apart from some of which the teacher saw nothing."""
    ids, scores = batch_of_maps(rng, count)
    placement = torch.eye(2, 3, dtype=torch.float64).repeat(count, 1, 1)
    placement[list(unseen), :, 2] = 5.0
    return TokenLabels(ids, scores, placement)


@pytest.mark.parametrize("rule, if_right, if_wrong", [("none", 1, 1), ("published", 0.5, 0.9), ("intended", 0.9, 0.5)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_targets_by_the_formula(rule, if_right, if_wrong, smoothing):
    rng = np.random.default_rng(2)
    taught = labels_for(8, rng, unseen=[5])
    whole = dense(taught.ids, taught.scores).mean(dim=(2, 3)).softmax(dim=1)  # 18 points along each axis: the centres
    truth = whole.argmax(dim=1)
    truth[::2] = (truth[::2] + 1) % CLASSES
    images = torch.zeros(8, 3, 64, 64)
    found = Augment(CLASSES, label_smoothing=smoothing, grid=4, ground_truth=rule)(
        images, truth, torch.Generator(), taught
    )
    own = F.one_hot(truth, CLASSES).double() * (1 - smoothing) + smoothing / CLASSES
    for i in range(8):
        share = if_wrong if i % 2 == 0 else if_right
        expected = share * (whole[i] * (1 - smoothing) + smoothing / CLASSES) + (1 - share) * own[i]
        torch.testing.assert_close(found.targets[i].double(), own[i] if i == 5 else expected, rtol=0, atol=1e-6)
    assert found.token_targets.shape == (8, 16, CLASSES) and found.mix_box is None
    sums = found.token_targets.sum(dim=2)
    assert (sums[5] == 0).all() and (sums[torch.arange(8) != 5] - 1).abs().max() < 1e-6
    alone = Augment(CLASSES, label_smoothing=smoothing, ground_truth=rule)(images, truth, torch.Generator(), taught)
    assert alone.token_targets is None
    torch.testing.assert_close(alone.targets, found.targets, rtol=0, atol=1e-6)


def test_mixup_mixes_the_targets_of_tokens():
    taught, images = labels_for(6, np.random.default_rng(0)), torch.randn(6, 3, 64, 64)
    labels = torch.arange(6)
    plain = Augment(CLASSES, grid=4)(images, labels, torch.Generator(), taught)
    lam, partners = augment.draw_mixup(6, 0.4, generator=torch.Generator().manual_seed(1))
    mixed = Augment(CLASSES, grid=4, mixup_alpha=0.4)(images, labels, torch.Generator().manual_seed(1), taught)
    for whole, tensor in zip(plain[:3], mixed[:3]):
        torch.testing.assert_close(tensor, lam * whole + (1 - lam) * whole[partners])


def published_box(grid, lam, row, column):
    half = int(grid * math.sqrt(1 - lam)) // 2
    clipped = np.clip([row - half, column - half, row + half, column + half], 0, grid)
    return tuple(clipped.tolist())


def test_boxes_are_distributed_as_published():
    grid, generator, rng = 14, torch.Generator().manual_seed(0), np.random.default_rng(0)
    ours = np.array([draw_mix_box(grid, generator=generator) for _ in range(4000)])
    draws = zip(rng.beta(1, 1, 40_000), *rng.integers(0, grid, (2, 40_000)))
    theirs = np.array([published_box(grid, *draw) for draw in draws])
    assert (ours[:, :2] <= ours[:, 2:]).all() and ours.min() >= 0 and ours.max() <= grid
    for column in range(4):
        both = [np.bincount(boxes[:, column], minlength=grid + 1) for boxes in (ours, theirs)]
        assert stats.chi2_contingency(np.stack(both)[:, np.sum(both, axis=0) > 0]).pvalue > 0.001
    areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (ours, theirs)]
    assert stats.ks_2samp(*areas).pvalue > 0.01 and (areas[0] == 0).any()


def test_the_box_is_a_function_of_seed_step_and_number():
    taught, images = labels_for(4, np.random.default_rng(0)), torch.zeros(4, 3, 64, 64)
    mix = Augment(CLASSES, grid=4, mix_token=True)
    boxes = []
    for place_ in ((0, 0), (0, 1), (1, 0), (0, 0)):
        generator = torch.Generator().manual_seed(augment.seed_for(0, *place_))
        boxes.append(mix(images, torch.arange(4), generator, taught).mix_box)
    assert boxes[0] == boxes[3] and len(set(boxes)) > 1


# -- loss ------------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A patch embedding and two linear heads, with the training output of a VOLO: the interface and nothing else."""

    def __init__(self, grid=4, dim=8):
        super().__init__()
        self.grid = grid
        self.embed = nn.Conv2d(3, dim, 16, 16)
        self.head, self.aux_head = nn.Linear(dim, CLASSES), nn.Linear(dim, CLASSES)

    def forward_train(self, images, mix_box=None):
        def paste(grid):
            if mix_box is None:
                return grid
            row0, column0, row1, column1 = mix_box
            pasted = grid.clone()
            pasted[:, row0:row1, column0:column1] = grid.flip(0)[:, row0:row1, column0:column1]
            return pasted

        tokens = paste(self.embed(images).permute(0, 2, 3, 1))
        logits = self.head(tokens.tanh().mean(dim=(1, 2)))
        return logits, paste(self.aux_head(tokens.tanh())).flatten(1, 2)

    def forward(self, images):
        return self.forward_train(images)[0]


def reference_loss(logits, token_logits, batch, *, dense_weight):
    """Sample by sample, cell by cell, in float64."""
    total, (count, cells, _) = 0.0, token_logits.shape
    row0, column0, row1, column1 = batch.mix_box or (0, 0, 0, 0)
    lam = 1 - (row1 - row0) * (column1 - column0) / cells
    for i in range(count):
        target = lam * batch.targets[i].double() + (1 - lam) * batch.targets[count - 1 - i].double()
        total -= (target * logits[i].double().log_softmax(dim=0)).sum()
        for n in range(cells):
            own = batch.targets[i] if batch.token_targets is None else batch.token_targets[i, n]
            total -= dense_weight / cells * (own.double() * token_logits[i, n].double().log_softmax(dim=0)).sum()
    return total


@pytest.mark.parametrize("mix_box", [None, (1, 0, 4, 2), (2, 2, 2, 2), (0, 0, 4, 4)])
@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_the_objective_by_loops(mix_box, taught, weight):
    torch.manual_seed(0)
    model = Tokens().double()
    images, labels = torch.randn(5, 3, 64, 64), torch.randint(CLASSES, (5,))
    targets = one_hot(labels, CLASSES, smoothing=0.1)
    token_targets = torch.randn(5, 16, CLASSES).softmax(dim=2) if taught else None
    if taught:
        token_targets[2, 3:9] = 0
    batch = Augmented(images.double(), targets, token_targets, mix_box)
    expected = reference_loss(*model.forward_train(batch.images, mix_box), batch, dense_weight=weight)
    torch.testing.assert_close(losses.TokenLabeling(dense_weight=weight)(model, batch), expected, rtol=1e-6, atol=0)
    halves = batch._replace(images=images.bfloat16())
    loss = losses.TokenLabeling(dense_weight=weight)(model.bfloat16(), halves)
    reference = reference_loss(*model.forward_train(halves.images, mix_box), halves, dense_weight=weight)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=0)


def test_targets_of_another_grid_are_refused():
    batch = Augmented(torch.zeros(2, 3, 64, 64), torch.eye(CLASSES)[:2], torch.zeros(2, 9, CLASSES))
    with pytest.raises(ValueError, match="logits of 16 tokens, expected 9"):
        losses.TokenLabeling(dense_weight=1)(Tokens(), batch)


def test_200_steps_without_labels_are_finite_and_learn():
    """Each token has its image's target; boxes of all sizes, the last image of an odd batch its own partner."""
    torch.manual_seed(0)
    model, mix = Tokens(), Augment(CLASSES, label_smoothing=0.1, grid=4, mix_token=True)
    objective = losses.TokenLabeling(dense_weight=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = []
    for step in range(200):
        labels = torch.randint(CLASSES, (7,))
        images = torch.randn(7, 3, 64, 64) * 0.1 + one_hot(labels, CLASSES)[:, :3, None, None]
        batch = mix(images, labels, torch.Generator().manual_seed(step))
        loss = objective(model, batch) / 7
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite() and all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        history.append(float(loss.detach()))
    assert np.mean(history[-20:]) < np.mean(history[:20]) - 0.3


def test_boxes_of_all_kinds_share_the_graphs_of_a_compiled_model():
    """Torch specialises on 0, 1 and equal numbers, and past eight graphs it silently runs eagerly."""
    torch._dynamo.reset()
    counters.clear()
    small = Structure((1, 1, 1, 1), (12, 24), (2, 4), mlp_ratio=1.0, stem_dim=8, timm_name="")
    model, images = VOLO(small, img_size=64, num_classes=5), torch.randn(4, 3, 64, 64)
    compiled, graphs = torch.compile(model.forward_train, backend="eager"), set()
    for box in ((0, 0, 2, 2), (1, 1, 3, 4), (0, 1, 1, 2), (2, 2, 2, 2), (1, 2, 4, 3), (0, 0, 0, 0), (0, 0, 4, 4)):
        for ours, plain in zip(compiled(images, mix_box=box), model.forward_train(images, mix_box=box)):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1 and max(graphs) > 0


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--loss.ground_truth", "intended"], "needs --data.token_labels true"),
        (["--loss.dense_weight", "-1"], "expected at least 0"),
        (["--augment.cutmix_alpha", "1", "--loss.dense_weight", "1", "--data.token_labels", "true"], "the image below"),
        (["--loss.dense_weight", "1", "--model.img_size", "72"], "needs a multiple of 16"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        config.parse(options, choose_recipe=lambda *_: config.TrainConfig())


@pytest.mark.parametrize(
    "options, mixes",
    [("", False), ("--loss.dense_weight 0.5", True), ("--loss.dense_weight 0.5 --augment.mixup_alpha 0.2", False)],
)
def test_the_loss_of_tokens_brings_mix_token_unless_mixup_is_there(options, mixes):
    found = config.apply(config.TrainConfig(model=config.ModelConfig(num_classes=2)), options.split())
    assert assembly.build_augment(found).mix_token == found.mixes_tokens == mixes


def test_a_model_without_token_logits_is_refused():
    c = config.TrainConfig(loss=config.LossConfig(dense_weight=0.5))
    with pytest.raises(ValueError, match="vit_b32 has no token logits"):
        assembly.build_objective(c, nn.Linear(2, 2))
    assert assembly.build_objective(config.TrainConfig(), nn.Linear(2, 2)) is losses.classification
    objective = assembly.build_objective(c, Tokens())
    assert objective == losses.TokenLabeling(dense_weight=0.5)
    batch = Augmented(torch.randn(2, 3, 64, 64), torch.eye(CLASSES)[:2])
    assert objective(Tokens(), batch).isfinite()
