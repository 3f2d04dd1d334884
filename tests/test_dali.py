"""The DALI loaders: timm's and torchvision's pixels, every sample once in our order, and errors that name the image.

Differences are in units of 1/255. DALI and PIL decode these JPEGs to the same bits; what differs is the rounding
between the two passes of DALI's resize, 0.2 on average, 9 at single pixels with strong contrast. torch's resize
rounds as PIL does: 0.04 on average.
"""

import dataclasses
import gc
import io
import itertools
import os
import re
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, types
from PIL import Image

import zoo  # noqa: F401  # lets torchvision be imported beside any build of torch
from largebatch.data import dali, order, randaugment, reader, records, stream
from largebatch.data.dali import EvalLoader, TrainLoader
from largebatch.data.order import Plan
from largebatch.data.randaugment_ops import fill_colour, with_pillow
from largebatch.data.scan import index_images, index_shards
from largebatch.files import Damaged

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEAN_BOUND, MAX_BOUND = 0.35, 16.0
NUM_IMAGES = 104
COMMON = {"mean": MEAN, "std": STD, "device": torch.device("cpu"), "num_threads": 2}
CROP = {"interpolation": "bicubic", "scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "hflip": 0.5}


def picture(rng, width, height):
    """Smooth colours, a few hard-edged shapes, a little grain."""
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    for _ in range(4):
        x, y = rng.integers(0, width), rng.integers(0, height)
        pixels[y : y + rng.integers(2, 80), x : x + rng.integers(2, 80)] = rng.integers(0, 256, 3)
    pixels += rng.integers(-6, 7, pixels.shape, dtype=np.int16)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encode(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def example(data, label):
    return records.encode_example({records.IMAGE: [data], records.LABEL: [label]})


def special_images(rng):
    """Files that do not look like the rest but must be read as timm reads them."""
    image, exif = picture(rng, 333, 250), Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to view", which timm ignores
    return [
        encode(image, exif=exif),
        encode(image.convert("L")),
        encode(image.convert("CMYK")),
        encode(image, "PNG"),
        encode(image, progressive=True),
        encode(image, subsampling=0),
        encode(picture(rng, 40, 31)),
        encode(picture(rng, 31, 300)),
    ]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """An index of files of many sizes, half of them smaller than the crop or nearly so."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("images")
    encoded = special_images(rng)
    while len(encoded) < NUM_IMAGES:
        width, height = rng.integers(120, 520, 2)
        encoded.append(encode(picture(rng, width, height), quality=int(rng.integers(75, 98))))
    files = [str(folder / f"{k:03d}.JPEG") for k in range(NUM_IMAGES)]
    for path, data in zip(files, encoded):
        with open(path, "wb") as file:
            file.write(data)
    return index_images(files, [k % 7 for k in range(NUM_IMAGES)], class_names=list("abcdefg"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Forty 8 x 8 images in three TFRecord files, for tests of the order."""
    folder = tmp_path_factory.mktemp("tiny")
    files = [str(folder / f"train-{k:05d}-of-00003") for k in range(3)]
    for path, numbers in zip(files, (range(15), range(15, 20), range(20, 40))):
        flat = [encode(Image.new("RGB", (8, 8), (6 * k, 6 * k, 6 * k)), quality=100) for k in numbers]
        pairs = [(data, k % 5 + 1) for data, k in zip(flat, numbers)]
        records.write_records(path, [example(data, label) for data, label in pairs])
    return index_shards(files).number_labels()


def train_loader(index, plan, *, shard=0, num_shards=1, img_size=8, start_step=0, **changes):
    options = COMMON | CROP | changes
    return TrainLoader(
        index, plan, shard=shard, num_shards=num_shards, img_size=img_size, start_step=start_step, **options
    )


def eval_loader(
    index, *, shard=0, num_shards=1, batch_size=16, img_size=8, crop_pct=0.9, interpolation="bicubic", **changes
):
    return EvalLoader(
        index,
        shard=shard,
        num_shards=num_shards,
        batch_size=batch_size,
        img_size=img_size,
        crop_pct=crop_pct,
        interpolation=interpolation,
        **COMMON | changes,
    )


def difference(ours, theirs):
    """Absolute, per image, in units of 1/255."""
    return ((ours - theirs).abs() * torch.tensor(STD)[:, None, None] * 255).flatten(1)


# -- pixels ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["DALI", "threads"])
def finished_by(request, monkeypatch):
    """Who resizes and normalises: DALI, as on a GPU, or our threads, as on a CPU."""
    monkeypatch.setattr(dali, "_finishes_on_cpu", lambda device: request.param == "threads")


@pytest.mark.parametrize("words", ["CUDA allocation failed", "Can't allocate 9 bytes on device 0.", "std::bad_alloc"])
def test_a_lack_of_memory_is_told_as_such(images, monkeypatch, words):
    """A validation then tries smaller batches. DALI has these words in a RuntimeError."""

    def fail(*_):
        raise RuntimeError(f"Critical error in pipeline: {words}")

    monkeypatch.setattr("nvidia.dali.Pipeline.run", fail)
    with pytest.raises(MemoryError, match=re.escape(words)):
        next(iter(eval_loader(images)))


@pytest.mark.parametrize("crop_pct, interpolation", [(0.9, "bicubic"), (0.875, "bilinear"), (1.15, "bicubic")])
@pytest.mark.usefixtures("finished_by")
def test_evaluation_equals_timms(images, crop_pct, interpolation):
    from timm.data import create_transform

    transform = create_transform(
        (3, 224, 224), is_training=False, crop_pct=crop_pct, interpolation=interpolation, mean=MEAN, std=STD
    )
    theirs = torch.stack([transform(Image.open(path).convert("RGB")) for path in images.files])
    loader = eval_loader(images, img_size=224, crop_pct=crop_pct, interpolation=interpolation)
    ours = torch.cat([batch.images for batch in loader])
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    delta = difference(ours, theirs)
    assert delta.mean(dim=1).max() < MEAN_BOUND, delta.mean(dim=1)
    assert delta.max() < MAX_BOUND


@pytest.mark.usefixtures("finished_by")
def test_training_crops_equal_torchvisions(images):
    from torchvision.transforms import InterpolationMode, functional

    plan = Plan(NUM_IMAGES, 52, 26, NUM_IMAGES, seed=1)
    flips = []
    for batch in train_loader(images, plan, img_size=160):
        draws = order.draw(
            plan.seed,
            np.zeros_like(batch.samples),
            batch.samples,
            width=images.width[batch.samples],
            height=images.height[batch.samples],
            scale=CROP["scale"],
            ratio=CROP["ratio"],
            hflip=CROP["hflip"],
        )
        theirs = []
        for k, sample in enumerate(batch.samples):
            image = Image.open(images.files[sample]).convert("RGB")
            box = [int(side[k]) for side in (draws.y, draws.x, draws.height, draws.width)]
            image = functional.resized_crop(image, *box, [160, 160], InterpolationMode.BICUBIC)
            image = functional.hflip(image) if draws.flip[k] else image
            theirs.append(functional.normalize(functional.to_tensor(image), MEAN, STD))
        delta = difference(batch.images, torch.stack(theirs))
        assert delta.mean(dim=1).max() < MEAN_BOUND and delta.max() < MAX_BOUND
        assert batch.labels.tolist() == [sample % 7 for sample in batch.samples]
        flips += draws.flip.tolist()
    assert len(flips) == NUM_IMAGES and 0.3 < np.mean(flips) < 0.7


def bytes_of(floats):
    """The levels (n, H, W, 3) that were normalised to floats (n, 3, H, W)."""
    levels = (floats * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
    assert (levels - levels.round()).abs().max() < 0.01
    return levels.round().byte().permute(0, 2, 3, 1).numpy()


def rotated(image):
    """A JPEG whose header says "rotate by 90 degrees to view", which timm ignores."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(image, exif=exif)


KINDS = {
    "4:2:0": lambda image: encode(image, subsampling=2),
    "4:2:2": lambda image: encode(image, subsampling=1),
    "4:4:4": lambda image: encode(image, subsampling=0),
    "grey": lambda image: encode(image.convert("L")),
    "progressive": lambda image: encode(image, progressive=True),
    "CMYK": lambda image: encode(image.convert("CMYK")),
    "rotated": rotated,
    "PNG": lambda image: encode(image, "PNG"),
}
SIDE = 64
CORNERS = [(x, y) for x in (0, 17, 86) for y in (0, 23, 67)]  # also odd ones, inside a block and a chroma sample


@pytest.fixture
def drawn_windows(monkeypatch):
    """Windows of as many pixels as the model wants, at CORNERS, so that the resize changes nothing."""

    def draw(seed, epochs, samples, **shape):
        x, y = np.array([CORNERS[sample] for sample in samples.tolist()], dtype=np.int32).T
        side = np.full(len(samples), SIDE, dtype=np.int32)
        return order.Draws(x, y, side, side, np.zeros(len(samples), dtype=bool))

    monkeypatch.setattr(order, "draw", draw)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("finished_by", "drawn_windows")
def test_windows_are_those_of_pil_to_the_bit(tmp_path, kind):
    """A whole image, cut after it was decoded, as on a GPU, and a region that alone is decoded, as on a CPU."""
    data = KINDS[kind](picture(np.random.default_rng(3), 86 + SIDE, 67 + SIDE))
    files = [str(tmp_path / f"{k}.JPEG") for k in range(len(CORNERS))]
    for path in files:
        with open(path, "wb") as file:
            file.write(data)
    index = index_images(files, [0] * len(files), class_names=["a"])
    (batch,) = train_loader(index, Plan(len(index), len(index), len(index), len(index), seed=0), img_size=SIDE)
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    boxes = [CORNERS[sample] for sample in batch.samples.tolist()]
    theirs = np.stack([np.asarray(whole.crop((x, y, x + SIDE, y + SIDE))) for x, y in boxes])
    assert np.array_equal(bytes_of(batch.images), theirs)


def test_a_gpu_is_told_to_decode_whole_images_as_pil_does(images, monkeypatch):
    """The same operator as above, with other options: those for a CPU have no effect there."""
    given = {}
    monkeypatch.setattr(fn.decoders, "image", lambda jpegs, **options: given.update(options))
    dali._decode(None, torch.device("cuda"), images)
    width, height = given.pop("preallocate_width_hint"), given.pop("preallocate_height_hint")
    assert 0.9 < np.mean(images.width <= width) < 1 and 0.9 < np.mean(images.height <= height) < 1
    assert given == {
        "device": "mixed",
        "hw_decoder_load": 0.9,
        "output_type": types.DALIImageType.RGB,
        "adjust_orientation": False,
        "jpeg_fancy_upsampling": True,
    }


def test_each_sample_has_a_resizing_filter_of_its_own():
    """The part of the graph of a GPU that nothing else runs on a CPU: a filter for each sample, given by its number."""
    pixels = np.asarray(picture(np.random.default_rng(4), 90, 70))
    names = list(dali.INTERPOLATIONS)
    pipe = Pipeline(batch_size=len(names), num_threads=1, device_id=None)
    with pipe:
        images = fn.external_source(lambda: [pixels] * len(names), batch=True, layout="HWC")
        filters = fn.external_source(lambda: np.array([dali.INTERPOLATIONS[name].value for name in names], np.int32))
        by_sample = fn.cast(filters, dtype=types.DALIDataType.INTERP_TYPE)
        pipe.set_outputs(fn.resize(images, size=(32, 32), interp_type=by_sample, antialias=True))
    pipe.build()
    (resized,) = pipe.run()
    for name, ours in zip(names, map(np.asarray, resized)):
        theirs = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling[name.upper()]))
        delta = np.abs(ours.astype(np.int16) - theirs)
        assert delta.mean() < MEAN_BOUND and delta.max() < MAX_BOUND, name


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "cifar10", "3a", "tf-m10-n2"])
@pytest.mark.usefixtures("finished_by")
def test_a_policy_is_applied_after_the_flip(images, text):
    """To the bit what Pillow makes of the images that the loader gives without it."""
    plan, policy = Plan(NUM_IMAGES, 52, 26, NUM_IMAGES, seed=1), randaugment.parse(text, 40)
    options = {"img_size": 40, "interpolation": "random"}
    pairs = list(zip(train_loader(images, plan, **options), train_loader(images, plan, policy=policy, **options)))
    changed = 0
    for plain, augmented in pairs:
        ops = randaugment.draw(policy, plan.seed, np.zeros_like(plain.samples), plain.samples)
        drawn = zip(bytes_of(plain.images), ops.codes, ops.arguments, ops.affine)
        expected = np.stack([with_pillow(image, fill_colour(MEAN), *operations) for image, *operations in drawn])
        assert np.array_equal(bytes_of(augmented.images), expected)
        assert augmented.images.dtype == torch.float32 and augmented.images.is_contiguous()
        changed += (plain.images != augmented.images).any(dim=(1, 2, 3)).sum().item()
    assert len(pairs) == 4 and changed > 0.5 * NUM_IMAGES
    assert changed < 0.9 * NUM_IMAGES or text in ("3a", "tf-m10-n2")


@pytest.mark.usefixtures("finished_by")
def test_a_random_filter_is_one_of_two(images):
    """Each image as it is with the filter that its sample draws."""
    plan = Plan(NUM_IMAGES, NUM_IMAGES, NUM_IMAGES, NUM_IMAGES, seed=1)
    names = ("bilinear", "bicubic", "random")
    batches = [next(train_loader(images, plan, img_size=40, interpolation=name)) for name in names]
    linear, cubic, either = (batch.images for batch in batches)
    bicubic = order.draw_bicubic(plan.seed, np.zeros(NUM_IMAGES), batches[0].samples)
    assert 0.3 < bicubic.mean() < 0.7 and (linear != cubic).flatten(1).any(dim=1).all()
    assert torch.equal(either, torch.where(torch.from_numpy(bicubic)[:, None, None, None], cubic, linear))


@pytest.mark.usefixtures("finished_by")
def test_padded_crops_equal_torchvisions(images):
    """Zeros around the stored image, a window of its size, then the resize."""
    from torchvision.transforms import functional

    plan = Plan(NUM_IMAGES, 52, 26, NUM_IMAGES, seed=1)
    for batch in train_loader(images, plan, img_size=160, padding=20, interpolation="bilinear"):
        sizes = {"width": images.width[batch.samples], "height": images.height[batch.samples]}
        draws = order.draw_padded(1, np.zeros(26), batch.samples, padding=20, hflip=0.5, **sizes)
        theirs = []
        for k, sample in enumerate(batch.samples):
            image = functional.pad(Image.open(images.files[sample]).convert("RGB"), 20)
            image = functional.crop(image, draws.y[k] + 20, draws.x[k] + 20, draws.height[k], draws.width[k])
            image = image.resize((160, 160), Image.Resampling.BILINEAR)
            image = functional.hflip(image) if draws.flip[k] else image
            theirs.append(functional.normalize(functional.to_tensor(image), MEAN, STD))
        delta = difference(batch.images, torch.stack(theirs))
        assert delta.mean(dim=1).max() < MEAN_BOUND and delta.max() < 30  # black beside white is the hardest edge


# -- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards, micro", [(1, 1), (1, 6), (2, 4), (3, 5), (4, 3)])
def test_each_sample_once_per_epoch_in_the_order_of_the_plan(tiny, num_shards, micro):
    plan = Plan(len(tiny), 24, micro, 3 * len(tiny), seed=2)
    seen = {}
    for shard in range(num_shards):
        batches = list(train_loader(tiny, plan, shard=shard, num_shards=num_shards))
        expected = [m for s in range(plan.num_steps) for m in plan.micro_batches(s, shard, num_shards)]
        assert [(b.step, b.number) for b in batches] == [(m.step, m.number) for m in expected]
        for batch, m in zip(batches, expected):
            assert batch.images.shape == (m.stop - m.start, 3, 8, 8)  # never empty
            assert batch.labels.tolist() == (batch.samples % 5).tolist() and batch.labels.dtype == torch.int64
            grey = (batch.images * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
            assert (grey.mean(dim=(1, 2, 3)) - 6 * torch.from_numpy(batch.samples)).abs().max() < 1.5
            seen |= dict(zip(range(m.start, m.stop), batch.samples.tolist()))
    stream = [seen[position] for position in range(plan.num_images)]
    assert stream == plan.samples(0, plan.num_images)[1].tolist()
    for epoch in range(3):
        assert sorted(stream[40 * epoch : 40 * epoch + 40]) == list(range(40))


def test_batches_are_not_overwritten(images):
    plan = Plan(NUM_IMAGES, 8, 8, 80, seed=0)
    kept, copies = [], []
    for batch in train_loader(images, plan, img_size=32):
        kept.append(batch.images)
        copies.append(batch.images.clone())
    assert len(kept) == 10 and all(torch.equal(a, b) for a, b in zip(kept, copies))


def test_a_part_that_is_kept_is_not_overwritten(images):
    plan = Plan(NUM_IMAGES, 8, 8, 160, seed=0)
    kept, copies = [], []
    for batch in train_loader(images, plan, img_size=32):
        kept.append(batch.images[3, 1:].flatten())  # the batch itself goes, and its memory may be wanted
        copies.append(kept[-1].clone())
    assert len(kept) == 20 and all(torch.equal(a, b) for a, b in zip(kept, copies))


def test_bytes_are_kept_until_the_device_has_copied_them(tiny, monkeypatch):
    """However far the host runs ahead of it."""
    device = [False]
    monkeypatch.setattr(stream, "reached", lambda stream: lambda: device[0])
    with closing(train_loader(tiny, Plan(len(tiny), 4, 4, 80, seed=0))) as loader:
        kept = loader._stream._used
        for count in range(1, 11):
            next(loader)
            assert len(kept) >= count
        bytes_of_first = kept[0][0].room.buffer
        before = bytes_of_first.copy()
        list(itertools.islice(loader, 5))
        assert np.array_equal(bytes_of_first, before)
        device[0] = True
        next(loader)
        assert len(kept) == 1


def test_memory_is_used_again_once_nobody_holds_it():
    memory = reader.Memory()
    tensor = torch.from_numpy(memory.take(1000))[10:20]
    place = tensor.data_ptr() - 10
    assert memory.take(1000).ctypes.data != place
    del tensor
    gc.collect()
    places = [memory.take(900), memory.take(1000)]
    assert place in [array.ctypes.data for array in places]
    assert len({array.ctypes.data for array in places}) == 2
    assert len(memory.take(5000)) == 5000


@pytest.mark.parametrize("padding, text, repeats", [(None, "", 1), (8, "rand-m9-mstd0.5-inc1", 1), (None, "3a", 3)])
def test_pixels_depend_on_neither_shards_nor_threads_nor_start(images, padding, text, repeats):
    plan = Plan(NUM_IMAGES, 24, 6, 72, seed=5, repeats=repeats)
    drawn = {"img_size": 48, "interpolation": "random", "padding": padding, "policy": randaugment.parse(text)}
    whole = {(b.step, b.number): b.images for b in train_loader(images, plan, **drawn)}
    for shard in range(3):
        for batch in train_loader(images, plan, shard=shard, num_shards=3, start_step=1, num_threads=1, **drawn):
            assert batch.step >= 1
            assert torch.equal(batch.images, whole.pop((batch.step, batch.number)))
    assert sorted(whole) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_shard_without_work_ends_at_once(tiny):
    plan = Plan(len(tiny), 4, 4, 8, seed=0)
    assert list(train_loader(tiny, plan, shard=1, num_shards=2)) == []
    loader = eval_loader(tiny, batch_size=40, shard=1, num_shards=2)
    assert len(loader) == 0 and list(loader) == []


@pytest.mark.parametrize("num_shards, batch_size", [(1, 16), (2, 7), (3, 1), (4, 64)])
def test_evaluation_covers_each_sample_once(tiny, num_shards, batch_size):
    seen = []
    for shard in range(num_shards):
        loader = eval_loader(tiny, shard=shard, num_shards=num_shards, batch_size=batch_size)
        for _ in range(2):  # may be iterated again
            batches = list(loader)
        assert len(batches) == len(loader) and all(len(b.images) == len(b.labels) > 0 for b in batches)
        assert [b.number for b in batches] == list(range(shard, shard + num_shards * len(batches), num_shards))
        seen += [sample for b in batches for sample in b.samples.tolist()]
        assert all((b.labels.numpy() == b.samples % 5).all() for b in batches)
    assert sorted(seen) == list(range(40))


@pytest.fixture
def pipelines(monkeypatch):
    """The batch sizes of all pipelines that are built."""
    built, build = [], stream.Stream._build_pipeline

    def note(self, max_batch_size, num_threads):
        built.append(max_batch_size)
        return build(self, max_batch_size, num_threads)

    monkeypatch.setattr(stream.Stream, "_build_pipeline", note)
    return built


def same_batches(ones, others):
    pairs = list(itertools.zip_longest(ones, others))
    return all(torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in pairs)


@pytest.mark.parametrize("batch_size", [104, 30, 8])  # one batch, a short last one, many
@pytest.mark.usefixtures("finished_by")
def test_all_evaluations_of_a_run_share_a_pipeline(images, pipelines, batch_size):
    options = {"img_size": 32, "batch_size": batch_size}
    first = list(eval_loader(images, **options))
    pipelines.clear()
    with closing(eval_loader(images, **options)) as loader:
        assert our_threads() == [] and not pipelines, "nothing is opened before it is needed"
        for _ in range(3):
            assert same_batches(loader, first)
            assert our_threads() == []
        counted = itertools.islice(loader, len(loader))  # as in the engine, which does not ask for a batch too many
        assert same_batches(counted, first) and same_batches(loader, first)
        assert pipelines == [batch_size]
        if batch_size < NUM_IMAGES:
            assert same_batches(itertools.islice(loader, 1), first[:1])  # the run is told to end in the evaluation
            assert our_threads() == []
            assert same_batches(loader, first) and pipelines == [batch_size] * 2
    assert same_batches(loader, first), "closed, and opened again"
    loader.close()
    loader.close()


def test_two_evaluations_at_once_do_not_share_batches(images, pipelines):
    with closing(eval_loader(images, img_size=16, batch_size=26)) as loader:
        first = list(loader)
        both = [list(pair) for pair in zip(*zip(loader, loader))]
        assert all(same_batches(batches, first) for batches in both) and len(pipelines) == 2
    assert our_threads() == []


# -- errors and ends -------------------------------------------------------------------------------------------------


EARLIER = set()


@pytest.fixture(autouse=True)
def earlier_threads():
    """Another file's test in this process may have left a loader open, which its garbage keeps."""
    EARLIER.update(threading.enumerate())


def our_threads():
    """Return the threads of the loaders that this test has opened."""
    names = ("largebatch-read", "largebatch-resize")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names) and thread not in EARLIER]


def spoiled(folder, sample, spoil):
    """Thirty records in two files; the bytes of one image are replaced after the index was built."""
    rng = np.random.default_rng(1)
    files = [str(folder / f"train-{k:05d}-of-00002") for k in range(2)]
    for path in files:
        data = [encode(picture(rng, 64, 48), quality=95) for _ in range(15)]
        records.write_records(path, [example(encoded, 1 + k % 3) for k, encoded in enumerate(data)])
    index = index_shards(files)
    with open(files[index.file[sample]], "r+b") as file:
        spoil(file, int(index.offset[sample]), int(index.length[sample]))
    return index


SPOIL = {
    "header": lambda file, offset, length: (file.seek(offset), file.write(b"\0" * 50)),
    "early end": lambda file, offset, length: (file.seek(offset + length // 4), file.write(b"\xff\xd9" * 200)),
    "cut off": lambda file, offset, length: file.truncate(offset + length // 2),
}


@pytest.mark.parametrize("kind", SPOIL)
@pytest.mark.parametrize("evaluation", [False, True])
def test_bad_image_is_named_and_nothing_hangs(tmp_path, kind, evaluation):
    index = spoiled(tmp_path, 29, SPOIL[kind])
    plan = Plan(30, 10, 5, 300, seed=0)
    loader = eval_loader(index, batch_size=5) if evaluation else train_loader(index, plan, scale=(1.0, 1.0))
    where = f"{index.files[1]}, record 14 .at byte {index.offset[29]}. (is cut off|cannot be decoded)"
    with pytest.raises(ValueError, match=where):
        for _ in loader:
            pass
    assert our_threads() == []
    assert evaluation or next(loader, None) is None  # closed


@pytest.mark.parametrize("micro, together", [(32, 8), (4, 10)])
def test_many_threads_wait_for_storage_at_once(tiny, micro, together):
    """Inside a batch of 32, and over small batches: no read gets its bytes before all of them have asked."""
    calls, barrier = itertools.count(), threading.Barrier(together)

    def preadv(*arguments):
        if next(calls) < together:
            barrier.wait(timeout=60)  # breaks, and so fails the test, if reads come one after the other
        return os.preadv(*arguments)

    plan = Plan(len(tiny), micro, micro, 40 if micro == 4 else 32, seed=3)
    seen = [sample for batch in train_loader(tiny, plan, preadv=preadv) for sample in batch.samples.tolist()]
    assert seen == plan.samples(0, plan.num_images)[1].tolist() and not barrier.broken


def test_few_batches_are_read_ahead_in_the_beginning_then_twice_as_many_as_are_taken():
    """Forty batches without images."""

    def encode(job):
        return stream.Encoded(job, np.arange(0), None, None)

    with closing(stream._ReadAhead(iter(range(1, 41)), encode, lambda *_: None, num_batches=7, first=3)) as ahead:
        waiting = [(next(ahead).job, len(ahead._waiting)) for _ in range(8)]
        assert waiting == [(1, 4), (2, 5), (3, 6), (4, 7), (5, 7), (6, 7), (7, 7), (8, 7)]
        assert [batch.job for batch in ahead] == [*range(9, 41)]


def test_reads_that_give_less_than_asked_are_continued(tiny):
    def short(descriptor, buffers, offset):
        return os.preadv(descriptor, [buffer[:100] for buffer in buffers], offset)

    plan = Plan(len(tiny), 10, 10, 40, seed=0)
    with closing(train_loader(tiny, plan)) as one, closing(train_loader(tiny, plan, preadv=short)) as other:
        pairs = list(zip(one, other))
    assert len(pairs) == 4 and all(torch.equal(whole.images, parts.images) for whole, parts in pairs)


def test_a_read_that_fails_beside_others_is_named(tiny):
    bad = int(tiny.offset[33])

    def preadv(descriptor, buffers, offset):
        if offset == bad and tiny.length[33] == len(buffers[0]):
            raise OSError(5, "Input/output error")
        return os.preadv(descriptor, buffers, offset)

    plan = Plan(len(tiny), 40, 40, 400, seed=0)
    where = f"{tiny.files[tiny.file[33]]}, record 13 .at byte {bad}. cannot be read: .*Input/output error"
    with pytest.raises(ValueError, match=where):
        list(train_loader(tiny, plan, preadv=preadv))
    assert our_threads() == []


def test_missing_file_is_named(tmp_path):
    index = spoiled(tmp_path, 0, lambda *_: None)
    (tmp_path / "train-00001-of-00002").unlink()
    with pytest.raises(ValueError, match="train-00001-of-00002, record .* cannot be read: .*No such file"):
        list(eval_loader(index))


@pytest.mark.parametrize("side", [64, 40000, 2**31 - 1])
def test_an_index_with_another_size_than_the_image_is_named(tiny, side):
    width = tiny.width.copy()
    width[33] = side
    plan = Plan(len(tiny), 40, 40, 400, seed=0)
    where = f"{tiny.files[tiny.file[33]]}, record 13 .at byte {tiny.offset[33]}. has 8 x 8 pixels, and {side} x 8 in"
    with pytest.raises(Damaged, match=f"{where} the index: delete the file of these images in .*, it is built again"):
        list(train_loader(dataclasses.replace(tiny, width=width), plan))
    with pytest.raises(Damaged, match=where):
        list(eval_loader(dataclasses.replace(tiny, width=width)))
    assert our_threads() == []


def test_close_ends_the_threads(tiny):
    loader = train_loader(tiny, Plan(len(tiny), 8, 4, 10_000, seed=0))
    next(loader)
    assert our_threads() != []
    loader.close()
    loader.close()
    assert our_threads() == [] and next(loader, None) is None
    for _ in eval_loader(tiny, batch_size=2):
        break
    assert our_threads() == []


def test_wrong_settings(tiny):
    with pytest.raises(ValueError, match="interpolation is 'cubic', expected one of bilinear, bicubic, lanczos"):
        eval_loader(tiny, interpolation="cubic")
    with pytest.raises(ValueError, match="The plan is for 41 samples, the index has 40"):
        train_loader(tiny, Plan(41, 8, 4, 80, seed=0))
    assert our_threads() == []
