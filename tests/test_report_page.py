"""The page about runs: what it tells, that it needs nothing else, and how it looks in a browser."""

import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread
from PIL import Image

from largebatch.config import OptimConfig, RunConfig, TrainConfig, dump
from largebatch.data.sources import open_source
from largebatch.files.run_folder import RunFolder
from largebatch.hooks.sinks import Csv
from largebatch.report import draw, history, page, panels, predictions, summary
from largebatch.report.__main__ import main
from largebatch.report.predictions import Answer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# What a reader would notice: text over text, a page wider than its window, letters too small to read.
LOOK = """<script>
const overlapping = [];
let smallest = 99;
for (const svg of document.querySelectorAll("figure > svg")) {
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const frame = svg.getBoundingClientRect();
  texts.forEach(([one, a], i) => {
    smallest = Math.min(smallest, a.height);
    if (a.left < frame.left - 1 || a.right > frame.right + 1) overlapping.push([svg.ariaLabel, one, "the edge"]);
    for (const [other, b] of texts.slice(i + 1))
      if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
        overlapping.push([svg.ariaLabel, one, other]);
  });
}
const seen = {overlapping, smallest, wide: document.documentElement.scrollWidth - window.innerWidth,
  width: window.innerWidth, page: getComputedStyle(document.body).backgroundColor,
  text: getComputedStyle(document.body).color, figures: document.querySelectorAll("figure").length};
parent.postMessage("LOOK" + JSON.stringify(seen) + "LOOK", "*");
</script>"""
FRAME = """<script>addEventListener("message", message => document.body.textContent = message.data)</script>
<body style="margin: 0"><iframe src="look.html" style="border: 0; width: {width}px; height: 4000px"></iframe></body>"""


def make_run(folder: Path, *, lr: float = 1e-3, num_steps: int = 60, trust: bool = True) -> Path:
    """A run that was stopped, killed and resumed, with some skipped steps; ten steps are an epoch."""
    folder.mkdir(parents=True)
    config = TrainConfig(recipe="quickstart", optim=OptimConfig(lr=lr), run=RunConfig(folder=str(folder)))
    config = replace(config, data=replace(config.data, global_batch_size=16, path="digits"))
    (folder / "config.yaml").write_text(dump(config))
    table = Csv(folder)
    table.steps.open(last_step=0)
    table.epochs.open(last_step=0)
    for step in range(1, num_steps + 1):
        place = {"step": step, "epoch": step / 10, "images": 16 * step, "lr": lr, "skipped": step // 20}
        row = place | {"loss": 3 / step, "grad_norm": math.inf if step == 5 else 1 / step, "time": 1000 + 60 * step}
        row |= {"images_per_s": math.nan if step == 1 else 500 + step, "stall": step / 10, "memory_gib": 1.5}
        table.write_step(row | ({"trust_min": 0.01, "trust_median": 1.0, "trust_max": 50.0} if trust else {}))
        if step % 10 == 0:
            top1 = 90.0 if step == 40 else step
            scores = {"train_loss": 3 / step, "eval_loss": 4 / step, "top1": top1, "top5": 95.0}
            table.write_epoch(place | scores)
            layers = {"step": step, "epoch": step / 10} | {f"blocks.{k}.mlp.weight": 0.1 * (k + 1) for k in range(12)}
            table.write_layers(layers)
    table.close()
    start = history.Start(
        time=1000.0, command="python -m largebatch.train --model vit_nano32", launcher="mpirun", ranks=4,
        hosts=["n1", "n2"], commit="0123abcd",
    )  # fmt: skip
    history.write_start(folder, start)
    end = {"ended": 2200.0, "last_step": 20, "reason": "SIGTERM reached 1 of 4 ranks"}
    with open(folder / "starts.jsonl", "a") as file:
        file.write(json.dumps({"end": end}) + "\n")
    history.write_start(folder, replace(start, time=4000.0, step=20))
    history.write_start(folder, replace(start, time=6000.0, step=40, ranks=2))
    return folder


class Page(HTMLParser):
    """The words, the tags and the addresses of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.words, self.ids, self.addresses, self.open = [], [], [], []
        self.source = file.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if tag == "figure" else []
        self.addresses += [found[name] for name in ("src", "href") if name in found]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The folder of a run with its page, and its answers to the held-out digits, the first 30 of them wrong."""
    folder = make_run(tmp_path_factory.mktemp("page") / "one")
    index = open_source("digits", split="validation").for_classes(10)
    losses = [10.0 - k / 100 if k < 30 else 0.1 for k in range(len(index))]
    answers = {k: Answer((int(index.label[k]) + (k < 30)) % 10, 0.9, loss) for k, loss in enumerate(losses)}
    predictions.write(folder / "predictions.csv", index, answers)
    assert main([str(folder), "--pictures"]) == 0
    return folder


@pytest.fixture(scope="module")
def two(one, tmp_path_factory) -> Path:
    """The folder of a page about two runs."""
    other = make_run(tmp_path_factory.mktemp("other") / "two", lr=0.01, trust=False)
    folder = other.parent / "both"
    assert main([str(one), str(other), "--output", str(folder), "--pictures"]) == 0
    return folder


def test_a_page_has_all_of_a_run(one):
    found = Page(one / "report.html")
    shown = {"loss", "top1", "lr", "grad_norm", "trust", "images_per_s", "stall", "memory_gib", "skipped", "hours"}
    assert {*found.ids} == shown | {"layers"}
    for words in (
        "60.00 % after epoch 6, best: 90.00 % after epoch 4",
        "531 img/s",
        "run one model vit_b32 at 224 px, 87,455,232 parameters",
        "recipe quickstart, with --model.img_size 224 --data.global_batch_size 16 ",
        "peak memory 1.50 GiB on rank 0",
        "A dotted upright line: the run was stopped or resumed there.",
        "stopped early after step 20: SIGTERM reached 1 of 4 ranks",
        "resumed after step 20: 4 ranks on n1, n2 by mpirun",
        "resumed after step 40 (the start before was killed): 2 ranks on n1, n2 by mpirun",
        "python -m largebatch.train --model vit_nano32 (commit 0123abcd)",
        "30 of 360 held-out images are taken for another class",
        "global_batch_size: 16",
    ):
        assert words in found.text, words


def test_what_a_short_last_step_and_an_empty_table_would_suggest_is_left_out(tmp_path):
    """Rows of 16 images, and a last one of 3; nothing was skipped; means stand in the middle of their epochs."""
    run = panels.Run(RunFolder(make_run(tmp_path / "run", num_steps=19)), "run")
    last = run.steps[-1] | {"step": 20.0, "epoch": 1.92, "images": 307.0, "grad_norm": 9.0, "noise_scale": 50.0}
    epochs = [row | {"epoch": end} for row, end in zip(run.epochs * 2, (1.0, 1.92))]
    run.steps, run.epochs = [*run.steps, last], epochs
    found = {panel.key: panel for panel in panels.panels([run])}
    assert "skipped" not in found and found["stall"].least == 10.0 and found["hours"].lines[0].points[-1][0] == 1.92
    for key in ("grad_norm", "images_per_s", "trust"):
        assert all(line.points[-1][0] == 1.9 for line in found[key].lines)
    means = next(line for line in found["loss"].lines if line.label == "training, mean")
    assert [x for x, _ in means.points] == pytest.approx([0.5, 1.46])
    scale, batch = found["noise_scale"].lines
    assert scale.points == [(1.92, 50.0)] and batch.label == "global batch" and batch.points[-1] == (1.92, 16.0)


def test_pictures_are_written_if_they_are_asked_for(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    assert main([str(folder)]) == 0 and capsys.readouterr().out == f"{folder}/report.html\n"
    assert not list(folder.glob("*.png"))


def test_the_page_needs_nothing_else(one, two):
    for folder in (one, two):
        found = Page(folder / "report.html")
        assert all(address.startswith("data:") for address in found.addresses)
        assert not re.search(r"url\((?!#)|@import|<script|<link|https?://", found.source)


def test_several_runs_have_a_legend_and_their_differences(two):
    found = Page(two / "report.html")
    assert "--optim.lr 0.001 0.01" in found.text and "--run.folder" not in found.text
    loss = next(panel for panel in panels.panels(panels.read_runs([two.parent / "two"])) if panel.key == "lr")
    assert not loss.lines[0].label, "a single run needs no name"
    assert found.source.count("one, held out") == found.source.count("two, held out") == 1


def test_the_pictures_are_drawn(one, two):
    for folder in (one, two):
        pictures = sorted(folder.glob("report_*.png"))
        maps = [picture for picture in pictures if picture.stem == "report_layers"]
        assert len(pictures) - len(maps) == 10 and len(maps) == (folder == one)
        for picture in set(pictures) - set(maps):
            image = imread(picture)[..., :3]
            assert 0.7 < (share := (image == 1).all(axis=-1).mean()) < 0.995, (picture, share)
    image = imread(two / "report_lr.png")[..., :3]
    for marked in panels.COLOURS[:2]:
        colour = [int(marked[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        assert (abs(image - colour).max(axis=-1) < 0.05).mean() > 1e-3


def test_the_answers_come_back_and_the_worst_are_first(one):
    rows = predictions.read(one / "predictions.csv")
    index = open_source("digits", split="validation")
    assert [row.label for row in rows] == index.label.tolist() and rows[7].where == index.where(7)
    names, counts = predictions.confusion(rows)
    assert names == list("0123456789") and sum(map(sum, counts)) == 360
    assert sum(counts[k][k] for k in range(10)) == 330 and counts[3][4] == sum(row.label == 3 for row in rows[:30])
    assert [row.sample for row in predictions.worst(rows, 5)] == [0, 1, 2, 3, 4]
    assert len(re.findall(r'src="data:image/jpeg', (one / "report.html").read_text())) == page.WORST
    many = [replace(row, label=row.label + 10 * (k % 5), label_name=f"{k % 5}") for k, row in enumerate(rows)]
    assert len(predictions.confusion(many)[0]) == predictions.MOST_CLASSES


@pytest.mark.parametrize("gone", [False, True])
def test_names_that_are_not_utf_8_come_back_and_are_shown(tmp_path, monkeypatch, gone):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    images = tmp_path / "images"
    for name in ("a", os.fsdecode(b"caf\xe9")):
        for split in ("train", "val"):
            (images / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(images / split / name / os.fsdecode(b"\xff.png"), "PNG")
    index = open_source(str(images), split="validation")
    folder = make_run(tmp_path / "run", num_steps=1)
    text = (folder / "config.yaml").read_text().replace("path: digits", f"path: {images}")
    (folder / "config.yaml").write_text(text)
    predictions.write(folder / "predictions.csv", index, {0: Answer(1, 0.5, 2.0), 1: Answer(1, 0.5, 0.1)})
    rows = predictions.read(folder / "predictions.csv")
    assert [row.where for row in rows] == [index.where(0), index.where(1)]
    assert [os.fsencode(row.label_name) for row in rows] == [b"a", b"caf\xe9"]
    if gone:
        shutil.rmtree(images)
    assert main([str(folder)]) == 0
    shown = (folder / "report.html").read_text(encoding="utf-8")
    assert "a, taken for caf\\udce9" in shown and "\\udcff.png" in shown and ("data:image/jpeg" in shown) != gone


def test_without_the_data_the_worst_images_are_named(one, tmp_path):
    rows = predictions.worst(predictions.read(one / "predictions.csv"), 3)
    config = panels.Run(RunFolder(one), "one").config
    assert predictions.small_images(replace(config, data=replace(config.data, path=str(tmp_path / "gone"))), rows) == []
    assert predictions.small_images(config, [replace(rows[0], where="elsewhere")]) == []


def test_mistakes_are_one_sentence(one, tmp_path, capsys):
    for words, sentence in (
        ([str(tmp_path)], "is not a run folder: expected a config.yaml in it"),
        ([str(one), str(one)], "There are 2 runs: give --output FOLDER for their page."),
    ):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert sentence in told and told.count("\n") == 1
    table = tmp_path / "predictions.csv"
    table.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is not a table of predictions"):
        predictions.read(table)


def test_a_peak_of_one_step_is_in_the_picture_of_a_long_run():
    """Points that lie within a pixel are drawn as one line, which reaches as high as they do."""
    points = [(float(x), 5.0 if x == 4321 else x % 7 / 7) for x in range(100_000)]
    lines = ([panels.Line("", "#0072b2", of)] for of in (points, points[:9]))
    long, short = (draw.panel_svg(panels.Panel("", "", of)) for of in lines)
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", long)]
    assert len(long) < 200_000 and min(heights) < 30 and short.count("<use") > 9  # with dots


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    folder = make_run(tmp_path / "new", num_steps=1)
    (folder / "starts.jsonl").unlink()
    assert main([str(folder)]) == 0 and "No start was written down" in Page(folder / "report.html").text
    (folder / "steps.csv").unlink()
    assert main([str(folder)]) == 0


def test_the_block_at_the_end(tmp_path, one):
    text = summary.describe(one, num_steps=60, mfu=1e-4)
    assert "    top-1      60.00 % after epoch 6, best: 90.00 % after epoch 4\n" in text
    told = "20.0 min on 2 ranks in 3 starts, 531 img/s, MFU 5.3 % of the datasheet, peak memory 1.50 GiB on rank 0"
    assert f"    time       {told}\n" in text
    assert text.startswith(f"{one}: complete, step 60 of 60\n") and "    resume " not in text
    early = summary.describe(one, num_steps=100)
    assert f"{one}: step 60 of 100\n" in early and "MFU" not in early
    assert "    resume     python -m largebatch.train --model vit_nano32, on any number of ranks\n" in early
    assert f"    validate   python -m largebatch.validate {one}\n" in early
    (one / "checkpoints" / "best").mkdir(parents=True)
    validated = f"    validate   python -m largebatch.validate {one}/checkpoints/best\n"
    assert validated in summary.describe(one, num_steps=60)
    told = f"{one}/checkpoints/best is the checkpoint of the best evaluation; {one} in its place, the newest"
    assert f"    weights    {told}\n" in summary.describe(one, num_steps=60) and "    weights " not in early
    assert summary.accuracy([]) == "no evaluation"
    (one / "checkpoints" / "best").rmdir()


def test_a_start_that_was_killed_counts_to_the_step_from_which_the_next_one_went_on(one):
    run = panels.Run(RunFolder(one), "one")
    killed, last = run.starts[1], replace(run.starts[2], ended=6600.0)
    assert summary.duration([killed, last], run.steps) == "10.0 min on 2 ranks in 2 starts"  # row 40 is of second 3400
    rows = [row | {"time": row["time"] + 2000} for row in run.steps]
    assert summary.duration([killed, last], rows) == "33.3 min on 2 ranks in 2 starts"  # 5400 - 4000 and 600


def test_a_run_is_known_elsewhere_and_not_taken_for_its_predecessor(one, tmp_path):
    """MLflow and W&B have an entry for each run; in containers many have the same path."""
    copy = shutil.copytree(one, tmp_path / "copy")
    assert history.identity(copy) == history.identity(one)
    (first, *others) = history.read_starts(copy)
    (copy / "starts.jsonl").unlink()
    history.write_start(copy, replace(first, time=first.time + 1))
    assert history.identity(copy) != history.identity(one)
    for other in others:
        before = history.identity(copy)
        history.write_start(copy, other)
        assert history.identity(copy) == before


def test_a_start_that_goes_on_counts_to_the_last_row(one):
    run = panels.Run(RunFolder(one), "one")
    assert run.steps[-1]["time"] == 4600
    assert summary.duration([replace(run.starts[1], ended=None)], run.steps) == "10.0 min on 4 ranks"  # from 4000


# -- in a browser ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step, epoch", [(1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (6, 5.0)])
def test_the_epoch_of_a_step_in_a_batch_ramp(step, epoch):
    """Rows after two steps of half an epoch, and after two of a whole one; later steps are like the last."""
    rows = [{"step": 2.0, "epoch": 1.0}, {"step": 4.0, "epoch": 3.0}]
    assert panels.epoch_of(step, rows) == pytest.approx(epoch)


@pytest.mark.parametrize("width, dark", [(1280, False), (400, True)])
@pytest.mark.parametrize("runs", ["one", "two"])
def test_nothing_overlaps_in_a_browser(request, tmp_path, runs, width, dark):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: {', '.join(BROWSERS)}")
    folder = request.getfixturevalue(runs)
    looked_at = (folder / "report.html").read_text().replace("</body>", f"{LOOK}</body>")
    (tmp_path / "look.html").write_text(looked_at)
    (tmp_path / "frame.html").write_text(FRAME.replace("{width}", str(width)))  # windows are at least 500 pixels wide
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--window-size=1400,4000", "--virtual-time-budget=20000"]
    command += [f"--blink-settings=preferredColorScheme={1 - dark}", "--allow-file-access-from-files"]
    command += ["--dump-dom", f"file://{tmp_path}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "LOOK" in done.stdout, done.stdout + done.stderr
    seen = json.loads(done.stdout.split("LOOK")[1].replace("&lt;", "<").replace("&amp;", "&"))
    assert seen["overlapping"] == [] and seen["wide"] <= 0 and seen["smallest"] >= 10 and seen["width"] == width, seen
    assert seen["figures"] >= 10 and (seen["page"] == "rgb(13, 17, 23)") is dark, seen
