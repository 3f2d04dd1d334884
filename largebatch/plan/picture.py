"""A picture of a plan: hours and cost over the number of GPUs."""

from dataclasses import asdict
from pathlib import Path

from largebatch.config import TrainConfig
from largebatch.files import atomic_file
from largebatch.plan.planning import Plan, fitted, on_gpus
from largebatch.plan.run import HOUR

# Name and colour of each part of a run, and how it lets GPU-hours grow.
PARTS = {
    "compute": ("passes", "#2463a6", "by passes that are too small to fill a GPU"),
    "exposed": ("reduction that they do not hide", "#c8442f", "by the reduction"),
    "optimizer": ("optimizer", "#7a9a3a", "by the optimizer, which does not shrink"),
    "input": ("wait for images", "#8a5fb0", "by the wait for images"),
    "rest": ("start, evaluations, checkpoints", "#999999", "by evaluations, checkpoints and the start"),
}
Points = dict[int, dict[str, float]]  # hours by part, for each number of GPUs


def over_gpus(config: TrainConfig, plan: Plan, *, num_images: int) -> Points:
    """Return the run on 1 to 10,000 GPUs, where they can share the global batch."""
    points: Points = {}
    for gpus in sorted({round(10 ** (eighth / 8)) for eighth in range(4 * 8 + 1)}):
        try:
            at, _, _ = fitted(config, gpus)
        except ValueError:  # no whole replica, or fewer images than GPUs
            continue
        step, run = on_gpus(at, plan, gpus, num_images=num_images)
        hours = run.training / step.seconds / HOUR
        points[gpus] = {name: seconds * hours for name, seconds in asdict(step).items()}
        points[gpus]["rest"] = (run.seconds - run.training) / HOUR
    return points


def bend(points: Points) -> tuple[int, str] | None:
    """Return the first number of GPUs whose GPU-hours are twice the lowest, and the part that grew most."""
    cost = {gpus: gpus * sum(hours.values()) for gpus, hours in points.items()}
    best = min(cost, key=lambda gpus: cost[gpus])
    for gpus, hours in points.items():
        if gpus > best and cost[gpus] > 2 * cost[best]:
            return gpus, max(hours, key=lambda name: gpus * hours[name] - best * points[best][name])
    return None


def draw_scaling(path: Path, points: Points, *, title: str, price: float | None) -> None:
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(11, 4.8), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    gpus, hours = [*points], [sum(parts.values()) for parts in points.values()]
    shares = [[100 * parts[name] / sum(parts.values()) for parts in points.values()] for name in PARTS]
    names, colours, _ = zip(*PARTS.values())
    right.stackplot(gpus, shares, labels=names, colors=colours, alpha=0.75)
    left.plot(gpus, hours, color="#c8442f", label="hours")
    left.plot(gpus, [hours[0] * gpus[0] / n for n in gpus], "--", color="#888888", label="hours, perfect scaling")
    label = f"cost, at {price:g} per GPU-hour" if price else "GPU-hours"
    left.plot(gpus, [one * n * (price or 1.0) for one, n in zip(hours, gpus)], color="#2463a6", label=label)
    if found := bend(points):
        for axes in (left, right):
            axes.axvline(found[0], color="#555555", linestyle=(0, (1, 3)))
        note = f"from {found[0]:,} GPUs on twice the GPU-hours, {PARTS[found[1]][2]}"
        figure.text(0.5, 0.92, note, ha="center", fontsize=9)
    left.set(yscale="log", ylabel=f"hours, {'cost' if price else 'GPU-hours'}")
    left.grid(color="#dddddd", linewidth=0.6)
    left.set_axisbelow(True)
    right.set(ylabel="% of the run", ylim=(0, 100))
    for axes in (left, right):
        axes.set(xscale="log", xlabel="GPUs", xlim=(gpus[0], gpus[-1]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    left.yaxis.set_major_formatter("{x:,.5g}")
    figure.suptitle(title + "\n", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
