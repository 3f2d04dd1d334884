"""One HTML page about runs. It loads nothing from elsewhere, so it can be sent by mail."""

import datetime
import html
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from shlex import quote

import torch

from largebatch.config import differences, dump, options
from largebatch.files import atomic_file
from largebatch.recipes import find
from largebatch.report import predictions, summary
from largebatch.report.draw import THIN, map_svg, panel_svg
from largebatch.report.history import events
from largebatch.report.panels import MAP, Panel, Run
from zoo import create_model

WORST = 24  # images
DASHES = ("solid", "dashed", "dotted")
CHOOSES = ("model.name", "model.weights", "data.path", "data.global_batch_size")  # a recipe
FOUND = ("data.path", "model.num_classes", "model.weights", "run.folder", "run.precision")  # by each run
MARKS = '<p class="soft">A dotted upright line: the run was stopped or resumed there.</p>'
STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --soft: #59636e; --line: #d9dee4; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --soft: #9aa4af; --line: #30363d; --card: #161b22; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px; max-width: 1500px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5em; margin: 0 0 .3em; overflow-wrap: anywhere; } h2 { font-size: 1.15em; margin: 1.6em 0 .5em; }
.soft { color: var(--soft); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  min-width: 0; }
figure > svg { display: block; width: 100%; height: auto; }
figcaption { font-weight: 600; font-size: .92em; margin-bottom: 4px; }
svg text { font-family: system-ui, sans-serif !important; }
@media (max-width: 560px) { svg text { font-size: 14px !important; } body { padding: 10px; } }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; list-style: none; margin: 4px 0 0; padding: 0;
  font-size: .82em; }
.legend li, td { overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 26px; margin-right: 5px; vertical-align: middle; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9em; }
td, th { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 6px; }
.confusion td, .confusion th { padding: 3px 6px; text-align: center; font-size: .82em; border: 1px solid var(--line); }
.confusion th:first-child { text-align: right; }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: 12px; }
.images div { font-size: .8em; overflow-wrap: anywhere; } .images img { display: block; width: 112px; height: 112px;
  object-fit: contain; background: var(--card); border: 1px solid var(--line); border-radius: 4px; margin-bottom: 3px; }
details { margin: 8px 0; } summary { cursor: pointer; } pre { overflow-x: auto; padding: 12px; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; font-size: .85em; }
"""


def write_page(file: Path, runs: Sequence[Run], panels: Sequence[Panel]) -> None:
    title = ", ".join(run.name for run in runs)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">largebatch report, {_moment(datetime.datetime.now().timestamp())}</p>',
        _results(runs),
        "<h2>Curves</h2>" + MARKS * any(panel.marks for panel in panels),
        f'<div class="grid">{"".join([*map(_panel, panels), *map(_map, runs)])}</div>',
        "<h2>Starts and ends</h2>" + "".join(_history(run, named=len(runs) > 1) for run in runs),
        _differences(runs),
        *(_predictions(run, named=len(runs) > 1) for run in runs),
        "<h2>Configuration</h2>",
        *(f"<details><summary>{_text(r.name)}</summary><pre>{_text(dump(r.config))}</pre></details>" for r in runs),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{_text(title)}</title><style>{STYLE}</style>"
    body = "\n".join(filter(None, parts))
    with atomic_file(file) as out:
        text = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'
        out.write(text.encode("utf-8", "backslashreplace"))  # a file name is bytes, which need not be UTF-8


def _results(runs: Sequence[Run]) -> str:
    """Return a table with a column for each run, so that a narrow window has room for the texts."""
    rows = {
        "model": [f"{run.config.model.name} at {run.config.model.img_size} px{_parameters(run)}" for run in runs],
        "data": [_data(run) for run in runs],
        "recipe": [f"{run.config.recipe or 'none'}{_changes(run)}" for run in runs],
        "held-out top-1": [summary.accuracy(run.epochs) for run in runs],
        "time": [summary.duration(run.starts, run.steps) for run in runs],
        "speed": [summary.speed(run.steps, None) for run in runs],
        "peak memory": [summary.memory(run.steps).removeprefix("peak memory ") for run in runs],
    }
    head = ("run", *(_dot(run) + _text(run.name) for run in runs))
    return _table(head, [(what, *map(_text, of)) for what, of in rows.items()])


def _data(run: Run) -> str:
    images = _num_images(run)
    classes = f" of {run.config.model.num_classes} classes" * bool(run.config.model.num_classes)
    size = f": {images:,} training images{classes}" if images else ""
    return f"{run.config.data.path}{size}"


def _num_images(run: Run) -> int:
    return round(run.steps[-1]["images"] / run.steps[-1]["epoch"]) if run.steps and run.steps[-1]["epoch"] else 0


def _parameters(run: Run) -> str:
    """Return the number of parameters; empty for a model of a user's file, which is not run here."""
    try:
        with torch.device("meta"):
            model = create_model(**run.config.model.arguments() | {"weights": None})
    except (ValueError, RuntimeError):
        return ""
    return f", {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def _changes(run: Run) -> str:
    """Return the options that differ from the recipe; empty for a recipe in a user's file, which is not run here."""
    given = {name: value for name, value in options(run.config).items() if name in CHOOSES}
    try:
        found = differences(find(given | {"recipe": run.config.recipe}, _num_images(run)), run.config)
    except ValueError:
        return ""
    shown = [f"--{name} {now}" for name, (_, now) in found.items() if name not in FOUND]
    return f", with {' '.join(shown)}" if shown else ""


def _panel(panel: Panel) -> str:
    caption = f'<figcaption>{_text(panel.title)} <span class="soft">by epoch</span></figcaption>'
    items = "".join(
        f'<li><i style="border-top: {2 if line.thin else 3}px {DASHES[line.dash]} {line.colour}; '
        f'opacity: {THIN if line.thin else 1}"></i>{_text(line.label)}</li>'
        for line in panel.lines
        if line.label
    )
    legend = f'<ul class="legend">{items}</ul>' if items else ""
    return f'<figure id="{panel.key}">{caption}{panel_svg(panel)}{legend}</figure>'


def _map(run: Run) -> str:
    caption = f"<figcaption>{MAP}: {_text(run.name)}</figcaption>"
    return f'<figure id="layers">{caption}{map_svg(run.layers)}</figure>' if run.layers else ""


def _history(run: Run, *, named: bool) -> str:
    rows = [(_moment(event.time), f"{event.step}", _text(event.text)) for event in events(run.starts)]
    commits = {start.commit: start.command for start in run.starts}
    commands = "".join(
        f'<p class="soft">{_text(command)}{f" (commit {_text(commit)})" if commit else ""}</p>'
        for commit, command in commits.items()
    )
    table = _table(("time", "step", "event"), rows) if rows else '<p class="soft">No start was written down.</p>'
    return (f"<h3>{_dot(run)}{_text(run.name)}</h3>" if named else "") + table + commands


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    found = {name for run in runs[1:] for name in differences(runs[0].config, run.config)} - {"run.folder"}
    rows = [(f"--{name}", *(_text(attrgetter(name)(run.config)) for run in runs)) for name in sorted(found)]
    if not rows:
        return "<h2>Differences</h2><p>All options are the same.</p>"
    return "<h2>Differences</h2>" + _table(("option", *(_text(run.name) for run in runs)), rows)


def _predictions(run: Run, *, named: bool) -> str:
    rows = predictions.read(run.folder.predictions)
    of = f" of {run.name}" if named else ""
    if not rows:
        folder, file = quote(str(run.folder.path)), quote(str(run.folder.predictions))
        command = f"python -m largebatch.validate {folder} --predictions {file}"
        told = f"For a confusion matrix and the worst images{of}, run {command} and then this report."
        return f'<p class="soft">{_text(told)}</p>'
    names, counts = predictions.confusion(rows)
    worst = predictions.worst(rows, WORST)
    wrong = sum(row.prediction != row.label for row in rows)
    images = predictions.small_images(run.config, worst) or [""] * len(worst)
    tiles = "".join(
        "<div>"
        + (f'<img src="{image}" alt="{_text(row.where)}" title="{_text(row.where)}">' if image else "")
        + f"{_text(row.label_name)}, taken for {_text(row.prediction_name)} ({100 * row.confidence:.0f} %)"
        + ("" if image else f'<br><span class="soft">{_text(row.where)}</span>')
        + "</div>"
        for row, image in zip(worst, images)
    )
    return (
        f"<h2>Confusion{_text(of)}</h2><p>{wrong:,} of {len(rows):,} held-out images are taken for another class. "
        f"A row of the table is a true class, a column the model's answer.</p>{_confusion(names, counts)}"
        f'<h2>Worst images{_text(of)}</h2><div class="images">{tiles}</div>'
    )


def _confusion(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    lines = [f"<tr><th></th>{''.join(f'<th>{_text(name)}</th>' for name in names)}</tr>"]
    for number, (name, line) in enumerate(zip(names, counts)):
        total = max(1, sum(line))
        cells = ""
        for column, value in enumerate(line):
            colour = "0, 158, 115" if column == number else "213, 94, 0"
            strength = min(1.0, value / total) ** 0.5 * 0.75
            cells += f'<td style="background: rgba({colour}, {strength:.2f})">{value or ""}</td>'
        lines.append(f"<tr><th>{_text(name)}</th>{cells}</tr>")
    return f'<div class="scroll"><table class="confusion">{"".join(lines)}</table></div>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    columns = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{columns}</tr>{lines}</table></div>'


def _dot(run: Run) -> str:
    return f'<span class="dot" style="background: {run.colour}"></span>'


def _text(value: object) -> str:
    return html.escape(str(value))


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
