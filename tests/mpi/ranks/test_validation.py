"""Validation on any number of ranks: ReaL labels, folders of weights, and memory that one rank lacks."""

import csv
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from largebatch import assembly, evaluation, validate
from largebatch.checkpoint import store
from largebatch.ranks import Stopped
from zoo import create_model, hub, save_weights, vit

CLASSES, IMAGES, SIDE = 6, 41, 64


@pytest.fixture(scope="module")
def folder(comm, tmp_path_factory):
    """Made by rank 0: images named as ImageNet's, ReaL labels, and the weights of two models."""
    place = comm.broadcast_object(tmp_path_factory.mktemp("validation"), name="folder")
    with comm.together("making images"):
        if comm.rank == 0:
            make(place)
    return place


def make(place) -> None:
    draws = np.random.default_rng(0)
    for number in range(IMAGES):
        (place / "val" / f"n{number % CLASSES}").mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "val" / f"n{number % CLASSES}" / f"ILSVRC2012_val_{number + 1:08d}.png")
    lists = [draws.choice(CLASSES, size=number % 3, replace=False).tolist() for number in range(IMAGES)]
    (place / "real.json").write_text(json.dumps(lists))
    (place / "weights").mkdir()
    for seed, name in enumerate(("one.safetensors", "two.pth")):
        torch.manual_seed(seed)
        model = create_model("vit_nano32", img_size=SIDE, num_classes=CLASSES)
        torch.nn.init.normal_(model.head.weight)
        save_weights(model, place / "weights" / name)


def validated(comm, folder, *words: str, weights: str = "one.safetensors") -> list[validate.Row]:
    model = ["--model", "vit_nano32", "--img-size", str(SIDE), f"--model.num_classes={CLASSES}", "--run.precision=fp32"]
    data = ["--data", str(folder), "--data.num_threads=1", "--run.deterministic=true"]
    config, flags = validate.read([*model, "--init-from", str(folder / "weights" / weights), *data, *words])
    return validate.validate(config, comm, flags)


def expected(folder, weights: str) -> dict[str, float]:
    """Image by image with PIL, in this process alone."""
    model = create_model(
        "vit_nano32", img_size=SIDE, num_classes=CLASSES, weights=folder / "weights" / weights
    ).eval()
    lists, hits = json.loads((folder / "real.json").read_text()), dict.fromkeys(("top1", "top5", "real1", "real5"), 0)
    for path in sorted(folder.glob("val/*/*")):
        pixels = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1)
        with torch.inference_mode():
            first = model(((pixels / 255 - 0.5) / 0.5)[None])[0].topk(5).indices.tolist()
        label, listed = int(path.parent.name[1:]), lists[int(path.name[15:23]) - 1]
        hits["top1"] += first[0] == label
        hits["top5"] += label in first
        hits["real1"] += first[0] in listed
        hits["real5"] += any(one in listed for one in first)
    counted = sum(map(bool, lists))
    return {
        "top1": 100 * hits["top1"] / IMAGES,
        "top5": 100 * hits["top5"] / IMAGES,
        "real_top1": 100 * hits["real1"] / counted,
        "real_top5": 100 * hits["real5"] / counted,
    }


@pytest.mark.parametrize("batch_size", [64, 5])
def test_a_folder_of_weights_with_real_labels(comm, folder, batch_size):
    table = folder / f"table{batch_size}.csv"
    rows = validated(
        comm, folder, "--all", "--real-labels", str(folder / "real.json"), "--csv", str(table),
        "--data.crop_pct=1", f"--data.eval_batch_size={batch_size}", weights="",
    )  # fmt: skip
    assert [row.weights.rpartition("/")[2] for row in rows] == ["one.safetensors", "two.pth"]
    for row in rows:
        reference = expected(folder, row.weights)
        assert {name: getattr(row, name) for name in reference} == reference
        assert (row.images, row.ranks, row.eval_batch_size) == (IMAGES, comm.size, min(batch_size, IMAGES))
    assert rows[0].loss != rows[1].loss and rows[0].real_top1 != rows[0].top1
    validated(comm, folder, "--csv", str(table))
    with open(table, newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 3 and written[2]["real_top1"] == ""
    for row, cells in zip(rows, written):
        assert cells == {name: str(value) for name, value in vars(row).items()}


def test_what_the_model_says_of_its_images_is_taken(comm, folder, monkeypatch):
    """When the weights are loaded, the longer limit of the start is over."""
    monkeypatch.setattr(comm._watchdog, "start_limit_s", 1000.0)
    (row,) = validated(comm, folder)
    assert comm._watchdog.start_limit_s is None
    assert (row.model, row.img_size, row.crop_pct, row.interpolation) == ("vit_nano32", SIDE, 0.9, "bicubic")


def test_images_are_prepared_as_config_json_beside_the_weights_says(comm, folder):
    """As `predict` does it; --data.crop_pct and the others still hold."""
    if comm.rank == 0:
        place = folder / "weights" / "exported"
        place.mkdir()
        weights = folder / "weights" / "one.safetensors"
        model = create_model("vit_nano32", img_size=SIDE, num_classes=CLASSES, weights=weights)
        save_weights(model, place / "model.safetensors")
        geometry = dict(crop_pct=0.5, interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
        (place / "config.json").write_text(json.dumps(hub.describe("vit_nano32", model, **geometry)))
    comm.broadcast_object(None, name="exported")
    (row,) = validated(comm, folder, weights="exported")
    assert (row.crop_pct, row.interpolation) == (0.5, "bilinear")
    given = ["--data.crop_pct=0.5", "--data.interpolation=bilinear"]
    given += ["--data.mean=0.1,0.2,0.3", "--data.std=0.4,0.5,0.6"]
    (other,) = validated(comm, folder, *given)
    assert row.loss == other.loss != validated(comm, folder)[0].loss
    (row,) = validated(comm, folder, "--data.crop_pct=0.9", weights="exported")
    assert (row.crop_pct, row.interpolation) == (0.9, "bilinear")


@pytest.fixture(scope="module")
def single(comm, folder) -> validate.Row:
    return validated(comm, folder, "--data.eval_batch_size=1")[0]


def allocate_too_much(images: torch.Tensor) -> None:
    torch.empty(2**50, dtype=torch.uint8)


def as_on_a_gpu(images: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    "fail, short, calls", [(allocate_too_much, "last", 0), (allocate_too_much, "last", 1), (as_on_a_gpu, "all", 0)]
)
def test_out_of_memory_on_some_ranks_halves_the_batch_on_all(
    comm, folder, single, monkeypatch, caplog, fail, short, calls
):
    """At the first batch or the second; the result is that of the smaller batch to the last bit."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(evaluation, "CHECK_EVERY", 2)
    forward, seen = vit.VisionTransformer.forward, []

    def limited(self, images):
        seen.append(len(images))
        if len(images) > 1 and len(seen) > calls and (short == "all" or comm.rank == comm.size - 1):
            fail(images)
        return forward(self, images)

    monkeypatch.setattr(vit.VisionTransformer, "forward", limited)
    (row,) = validated(comm, folder, "--data.eval_batch_size=4")
    assert row == single and row.eval_batch_size == 1
    told = [message for message in caplog.messages if "out of memory" in message]
    assert len(told) == (2 if comm.rank == 0 else 0)


def test_not_even_one_image(comm, folder, monkeypatch):
    monkeypatch.setattr(vit.VisionTransformer, "forward", lambda self, images: as_on_a_gpu(images))
    with pytest.raises(Stopped, match="Memory does not suffice to evaluate one image at a time"):
        validated(comm, folder, "--data.eval_batch_size=2")


def test_other_errors_are_no_lack_of_memory(comm, folder, monkeypatch):
    def broken(self, images):
        raise RuntimeError("the sizes do not match")

    monkeypatch.setattr(vit.VisionTransformer, "forward", broken)
    with pytest.raises(RuntimeError, match="the sizes do not match"):
        validated(comm, folder, "--data.eval_batch_size=1")  # so that no rank is without one


def test_weights_for_other_classes_are_refused(comm, folder):
    """A head for ours would be drawn at random."""
    with comm.together("writing"):
        if comm.rank == 0:
            save_weights(create_model("vit_nano32", img_size=SIDE, num_classes=CLASSES + 1), folder / "more.pth")
    with pytest.raises(Stopped, match=f"has a head of {CLASSES + 1} classes, the model one of {CLASSES}"):
        validated(comm, folder, weights="../more.pth")


def write_checkpoint(run: Path, step: int, weights: Path) -> None:
    folder = run / "checkpoints" / f"{step:08d}"
    folder.mkdir(parents=True)
    shutil.copy(weights, folder / "model.safetensors")
    (folder / "state.pt").touch()
    parts = {file.name: {"bytes": file.stat().st_size, "sha256": hub.digest(file)} for file in folder.iterdir()}
    (folder / "manifest.json").write_text(store._manifest(parts, step=step))


@pytest.mark.parametrize("every", [False, True])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_no_failure(comm, folder, monkeypatch, caplog, every):
    """A run writes 3 and removes 1 and 2 (every: it removes 1) while the images are opened, after the choice."""
    run, weights = folder / f"run{every}", folder / "weights" / "one.safetensors"
    with comm.together("writing"):
        if comm.rank == 0:
            for step in (1, 2):
                write_checkpoint(run, step, weights)
    real = assembly.open_data

    def rotate(*args, **options):
        with comm.together("rotating"):
            if comm.rank == 0:
                write_checkpoint(run, 3, weights)
                for step in (1,) if every else (1, 2):
                    shutil.rmtree(run / "checkpoints" / f"{step:08d}")
        return real(*args, **options)

    monkeypatch.setattr(assembly, "open_data", rotate)
    rows = validated(comm, folder, *(["--all"] if every else []), weights=f"../run{every}")
    assert [Path(row.weights).parent.name for row in rows] == ["00000002" if every else "00000003"]
    if comm.rank == 0:
        assert f"0000000{1 if every else 2}/model.safetensors has been removed since it was chosen" in caplog.text


def test_weights_that_are_not_there_are_one_sentence(comm, folder):
    with pytest.raises(Stopped, match="there is no weights file .*nothing.pth"):
        validated(comm, folder, weights="nothing.pth")


def test_a_table_that_is_something_else(comm, folder):
    with comm.together("writing"):
        if comm.rank == 0:
            (folder / "notes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(Stopped, match="notes.csv is not a table of validations"):
        validated(comm, folder, "--csv", str(folder / "notes.csv"))
