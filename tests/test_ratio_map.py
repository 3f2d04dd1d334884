"""The map of trust ratios: which colour stands where."""

import csv
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from largebatch.files.run_folder import Row
from largebatch.report.draw import draw_curves, draw_map
from largebatch.report.panels import by_kind, tensors

NAMES = [f"blocks.{block}.{part}.weight" for block in range(3) for part in ("attn.qkv", "mlp.fc1")]
NAMES = ["patch_embed.proj.weight", *NAMES, "head.weight"]


def rows(num_rows: int) -> list[Row]:
    """Ratios that are one number each: 100 × the epoch + the place of the tensor in the model."""
    return [
        {"step": 10 * epoch, "epoch": epoch} | {name: 100 * epoch + place for place, name in enumerate(NAMES)}
        for epoch in range(1, num_rows + 1)
    ]


def test_tensors_of_a_kind_stand_together_in_the_order_of_the_blocks():
    assert tensors(rows(1)) == NAMES and tensors([]) == []
    kinds = by_kind(NAMES)
    assert list(kinds) == ["patch_embed.proj", "blocks.*.attn.qkv", "blocks.*.mlp.fc1", "head"]
    assert kinds["blocks.*.mlp.fc1"] == [f"blocks.{block}.mlp.fc1.weight" for block in range(3)]
    others = by_kind(["network.0.1.attn.v.weight", "network.2.0.attn.v.weight", "layer1.0.conv1", "layer2.0.conv1"])
    assert list(others) == ["network.*.*.attn.v", "layer1.*.conv1", "layer2.*.conv1"]


def test_each_ratio_is_in_its_place():
    axes, table = Figure().subplots(), rows(4)
    table[2]["head.weight"] = math.nan
    table[1]["head.weight"] = 0.0  # has no logarithm
    draw_map(axes, table)
    (mesh,) = axes.collections
    order = [0, 1, 3, 5, 2, 4, 6, 7]
    expected = np.array([[100.0 * epoch + place for epoch in range(1, 5)] for place in order])
    expected[7, 1:3] = math.nan
    drawn = np.ma.filled(np.ma.asarray(mesh.get_array(), dtype=float), math.nan).reshape(8, 4)
    np.testing.assert_array_equal(drawn, expected)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0, 1, 2, 3, 4]  # an evaluation reaches back to the one before
    assert axes.yaxis_inverted()
    labels = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels())))
    assert labels == {0.5: "patch_embed.proj", 2.5: "blocks.*.attn.qkv × 3", 5.5: "blocks.*.mlp.fc1 × 3", 7.5: "head"}


@pytest.mark.parametrize("num_rows, shown", [(1, False), (3, True)])
def test_the_picture_of_a_run_has_the_map(tmp_path, num_rows, shown):
    """Beside the three lines, from the second evaluation on: a map of one is no course."""
    steps = "step,epoch,images,lr,loss,grad_norm,images_per_s,skipped,trust_min,trust_median,trust_max\n"
    (tmp_path / "steps.csv").write_text(steps + "1,1,10,1,2,3,4,0,1,2,3\n2,2,20,1,2,3,4,0,1,2,3\n")
    with open(tmp_path / "layers.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "epoch", *NAMES])
        writer.writeheader()
        writer.writerows(rows(num_rows))
    draw_curves(tmp_path, title="a run")
    picture = imread(tmp_path / "curves.png")[..., :3]
    yellow = np.abs(picture - np.array([253, 231, 37]) / 255).max(axis=-1) < 0.05  # the highest ratio
    assert bool(yellow.mean() > 1e-3) is shown and (picture.shape[0] > 1000) is shown
