"""Training images out of JPEGs: our loader beside timm's, and beside itself on slow storage.

The loaders decode, crop, resize, flip, augment (with --auto-augment) and normalise, for a consumer that does nothing.
With --device cuda ours does so on the GPU; another one of ours does so on CPUs, as timm's always does. A round takes
images out of a loader that is already running. It begins when all loaders are idle and no file is left in the page
cache; batches that are ready then count: three of ours, two of each of timm's workers.

The peer reads the same images as files in folders of classes, with as many worker processes as ours has threads.
"""

import argparse
import hashlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from largebatch.benchmark.measure import Contender, Report, Round, add_device_options, compare, set_up_device
from largebatch.config import byte_size
from largebatch.data.dali import TrainLoader
from largebatch.data.index import COLUMNS, Index
from largebatch.data.order import Plan
from largebatch.data.randaugment import parse
from largebatch.data.sources import open_source
from largebatch.files import cache_folder, safe_cache, written_once
from zoo import _torchvision  # noqa: F401  # lets timm import torchvision beside any build of torch

AUGMENTED: dict[str, Any] = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "hflip": 0.5}  # on both sides
AUGMENTED |= {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
MOST = 4000  # images of the data set that are used; the peer needs a copy of each
DELAY_S = 0.005
CPU = torch.device("cpu")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="synthetic", help="what largebatch.train's --data takes")
    parser.add_argument("--cache", default="200 GB", help="and its --data.cache")
    parser.add_argument("--img-size", type=int, default=224, help="image side in pixels")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch")
    parser.add_argument("--interpolation", default="bicubic", choices=["bicubic", "bilinear"], help="of both sides")
    parser.add_argument("--auto-augment", default="", help="policy of both sides, such as rand-m9-mstd0.5-inc1")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)), help="and timm's workers")
    parser.add_argument("--images", type=int, default=4096, help="images per round, in whole batches")
    parser.add_argument("--vs", nargs="+", default=["timm"], choices=["timm", "none"])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each contender")
    add_device_options(parser)


def run(options: argparse.Namespace) -> Report:
    device = set_up_device(options)
    cache = byte_size(options.cache)
    if cache < 0:
        raise ValueError(f"--cache is {options.cache}: expected a size, such as '200 GB'.")
    index = some(open_source(options.data, split="train", allow_incomplete=True, cache=cache), MOST)
    if not 0 < options.batch_size <= min(len(index), options.images):
        most = f"{min(len(index), options.images)}: no more than the images of the data set and of a round"
        raise ValueError(f"--batch-size is {options.batch_size}, expected 1 to {most}.")
    if options.auto_augment.startswith(("cifar10", "tf")) and "timm" in options.vs:
        raise ValueError(f"--auto-augment is {options.auto_augment}, a policy that timm does not have: add --vs none.")
    late = f"largebatch, {1000 * DELAY_S:.0f} ms late"
    contenders = [Contender("largebatch", partial(ours, options, index, device=device))]
    contenders += [Contender(late, partial(ours, options, index, device=device, preadv=late_preadv))]
    if device.type != "cpu":
        contenders.append(Contender("largebatch, on CPUs", partial(ours, options, index, device=CPU)))
    files, notes = list(index.files), []
    if "timm" in options.vs:
        folder = as_folders(index)
        files += [str(path) for path in folder.rglob("*.JPEG")]
        prefetcher = faster_with_prefetcher(options, folder)
        contenders.append(Contender("timm", partial(timms, options, folder, use_prefetcher=prefetcher)))
        notes.append(f"timm: use_prefetcher={prefetcher} is the faster; its workers' memory is not counted")
    results = compare(contenders, device=device, rounds=options.rounds, barrier=partial(settle, files))
    batches = options.images // options.batch_size
    images = batches * options.batch_size
    title = (
        f"{options.img_size} px crops of {len(index)} JPEGs ({index.length.mean() / 1000:.0f} kB on average, "
        f"{len(index.files)} files), {options.interpolation}, batch {options.batch_size}, {options.num_threads} threads"
    ) + (f", {options.auto_augment}" if options.auto_augment else "")
    own_rate = median(a / b for a, b in zip(results[0].seconds, results[1].seconds))
    rate = images / median(results[0].seconds) / len(os.sched_getaffinity(0))
    notes += [f"{1000 * DELAY_S:.0f} ms in every read: {100 * own_rate:.1f} % of its own rate"]
    notes += [f"largebatch: {rate:.0f} img/s per core"] if device.type == "cpu" else []
    return Report("loader", title, results, device, images=images, notes=notes)


def some(index: Index, most: int) -> Index:
    """Return an index of at most `most` images, spread evenly over the data set."""
    chosen = np.unique(np.linspace(0, len(index) - 1, min(most, len(index)), dtype=np.int64))
    return replace(index, **{name: getattr(index, name)[chosen] for name in COLUMNS})


# -- before and during a round --------------------------------------------------------------------------------------


def settle(files: Iterable[str]) -> None:
    """Wait until all loaders have filled their queues and are idle, then drop the files from the page cache."""
    spent = -1.0
    while (now := cpu_seconds()) - spent > 0.005:
        spent = now
        time.sleep(0.1)
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cpu_seconds() -> float:
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    spent = 0.0
    for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*")):
        with suppress(FileNotFoundError):  # it has ended in the meantime
            spent += int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


# -- ours -----------------------------------------------------------------------------------------------------------


def late_preadv(descriptor: int, buffers: list, offset: int) -> int:
    time.sleep(DELAY_S)
    return os.preadv(descriptor, buffers, offset)


@contextmanager
def ours(
    options: argparse.Namespace, index: Index, *, device: torch.device, preadv: Any = os.preadv
) -> Iterator[Round]:
    """Open the loader of training, in a run that never ends."""
    plan = Plan(len(index), options.batch_size, options.batch_size, 2**40, seed=0)
    loader = TrainLoader(
        index,
        plan,
        shard=0,
        num_shards=1,
        img_size=options.img_size,
        **AUGMENTED,
        interpolation=options.interpolation,
        device=device,
        num_threads=options.num_threads,
        policy=parse(options.auto_augment, options.img_size, options.interpolation),
        preadv=preadv,
    )
    with closing(loader):
        yield partial(consume, loader, options.images // options.batch_size)


def consume(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)


# -- the peer -------------------------------------------------------------------------------------------------------


def as_folders(index: Index) -> Path:
    """Return a folder in the cache with the images as <class>/<number>.JPEG, written once."""
    known = (index.files, index.file_size.tolist(), index.file_mtime_ns.tolist(), len(index))
    folder = safe_cache(cache_folder()) / f"benchmark-{hashlib.sha256(repr(known).encode()).hexdigest()[:12]}"
    return written_once(folder, partial(_write_folders, index=index))


def _write_folders(folder: Path, go_on: Callable[[], None], *, index: Index) -> None:
    for number, label in enumerate(index.label):
        path = folder / f"{label:05d}" / f"{number:06d}.JPEG"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(index.read(number))
        go_on()
    os.sync()  # the page cache drops only pages that are on disk


def faster_with_prefetcher(options: argparse.Namespace, folder: Path) -> bool:
    """Return whether timm is faster when the main process, not its workers, normalises the images."""
    seconds = {}
    for choice in (True, False):
        with timms(options, folder, use_prefetcher=choice) as take:
            take()
            began = time.perf_counter()
            take()
            seconds[choice] = time.perf_counter() - began
    return seconds[True] <= seconds[False]


def as_ours(transform: Any) -> None:
    """Make timm's operations warp bilinearly, as ours do, and never posterize to zero bits, which Pillow refuses."""
    for operation in (operation for step in transform.transforms for operation in getattr(step, "ops", ())):
        operation.kwargs["resample"] = Image.Resampling.BILINEAR
        if operation.name == "PosterizeIncreasing":
            operation.magnitude_max = 9.99


@contextmanager
def timms(options: argparse.Namespace, folder: Path, *, use_prefetcher: bool) -> Iterator[Round]:
    """Open timm's loader, with workers that survive the end of an epoch."""
    from timm.data import ImageDataset, create_loader

    loader = create_loader(
        ImageDataset(str(folder)),
        input_size=(3, options.img_size, options.img_size),
        batch_size=options.batch_size,
        is_training=True,
        **AUGMENTED,
        # With 0 it would run a transform without effect.
        color_jitter=0.3 if options.auto_augment == "3a" else None,  # type: ignore[arg-type]
        auto_augment=options.auto_augment or None,
        interpolation=options.interpolation,
        num_workers=options.num_threads,
        device=CPU,
        use_prefetcher=use_prefetcher,
        use_multi_epochs_loader=True,
    )
    inner: Any = loader.loader if use_prefetcher else loader
    as_ours(inner.dataset.transform)
    # This process has threads, so it must not be forked.
    inner.multiprocessing_context = multiprocessing.get_context("forkserver")
    inner.multiprocessing_context.set_forkserver_preload(["zoo", "timm.data"])
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    yield partial(consume, batches, options.images // options.batch_size)
    inner.iterator._shutdown_workers()
