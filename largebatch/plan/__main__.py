"""What a run needs: batch, memory, hours, GPU-hours, images, checkpoints, before anything is paid.

    python -m largebatch.plan --gpus 200 --gpu a100 --model vit_b32 --global-batch 32768 --epochs 300
    python -m largebatch.plan --gpus 64 --gpu h100 --recipe volo_d5 --price-per-gpu-hour 2.5
    python -m largebatch.plan RUN --gpus 64 --gpu h100                the options of a run, from its config.yaml
    python -m largebatch.plan --target results.csv --global-batch 512 hours to a target, and on how many GPUs
    python -m largebatch.plan validate docs/planner.csv               predictions beside published and measured runs
    python -m largebatch.plan validate A/step.csv B/step.csv          beside your own steps, predicted from the first

Every option of largebatch.train may follow, such as --model.grad_checkpointing true. Nothing is computed and nothing is
written but the pictures that are asked for. Neither Horovod nor DALI nor a GPU is needed.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.arguments import Parser, complain, expanded
from largebatch.config import TrainConfig, parse
from largebatch.devices import DEVICES
from largebatch.files.names import printable
from largebatch.files.run_folder import RunFolder
from largebatch.plan import constants

if TYPE_CHECKING:
    from largebatch.plan.step import Cluster, Speed


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["validate"]:
            return validate(words[1:])
        return plan(words)
    except (ValueError, OSError) as mistake:
        return complain(mistake)
    except RuntimeError as error:
        from largebatch.plan.trace import Uncountable  # the models' modules take seconds to import

        if not isinstance(error, Uncountable):
            raise
        return complain(error)


def plan(words: Sequence[str]) -> int:
    """Print a plan; return 1 if it does not fit into the device."""
    options, config, cluster = read(words)

    from largebatch.plan import text
    from largebatch.plan.calibrate import calibrated
    from largebatch.plan.planning import make_plan
    from largebatch.plan.step import Speed

    speed = calibrated(options.calibrate, config, cluster) if options.calibrate else Speed()
    if options.search:
        return _search(config, cluster, speed, json=options.json)
    curve = None
    if options.target:
        from largebatch.plan.target import at_target, choices, curve_of

        curve = curve_of(options.target, config, num_images=options.num_images)
        config = at_target(config, curve, num_images=options.num_images)
    counts = {"num_images": options.num_images, "hours_per_failure": options.gpu_hours_per_failure}
    made = make_plan(config, cluster, speed=speed, **counts)
    cost = {"price": options.price_per_gpu_hour, "watts": options.watts_per_gpu}
    target = choices(config, made, curve, **counts) if curve else []
    print(text.as_json(made, **cost, target=target) if options.json else "\n".join(text.lines(made, **cost)))
    if curve and not options.json:
        print(*map(printable, text.target_lines(made, curve, target, price=options.price_per_gpu_hour)), sep="\n")
    if options.picture:
        from largebatch.plan.picture import draw_scaling, over_gpus

        where = f"{config.model.name} on {made.cluster.device.name}, global batch {config.data.global_batch_size}"
        points = over_gpus(config, made, num_images=options.num_images)
        title = f"{where}, or the nearest that is exact; predicted"
        draw_scaling(options.picture, points, title=title, price=options.price_per_gpu_hour)
    return int(made.memory.total > cluster.device.memory)


def validate(words: Sequence[str]) -> int:
    from largebatch.plan import validation

    parser = Parser("plan validate", validation.__doc__)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE", help="docs/planner.csv, or tables of steps")
    rows = validation.validated(parser.parse_args(words).tables, lambda words: read(words)[1:])
    print("\n".join(map(printable, validation.lines(rows))))
    return 0


def read(words: Sequence[str]) -> tuple[argparse.Namespace, TrainConfig, "Cluster"]:
    """Return the options of a plan, the config and the cluster; ValueError for mistakes."""
    from largebatch.plan.planning import cluster_of

    run = expanded(words[0]) if words and not words[0].startswith("-") else ""
    options, training = _parser().parse_known_args(words[bool(run) :])
    _check(options)
    cluster = cluster_of(
        options.gpus,
        options.gpu,
        per_host=options.gpus_per_host,
        network=options.network,
        cores_per_rank=options.cores_per_rank,
    )
    return options, read_config(run, options, training), cluster


def read_config(run: str, options: argparse.Namespace, training: Sequence[str]) -> TrainConfig:
    """Return the config of the folder `run`, if it is not empty, with the options of largebatch.train."""
    from largebatch.recipes import find

    words = list(training)
    if run:
        words = ["--config", str(RunFolder(run).check().config), *words]
    for option, value in (("global_batch_size", options.global_batch), ("micro_batch_size", options.micro_batch)):
        words += [] if value is None else [f"--data.{option}", str(value)]
    if options.epochs is not None:
        words += ["--run.duration", f"{options.epochs:g} epochs"]

    def choose(given: Mapping[str, Any]) -> TrainConfig:
        if "data.path" not in given:  # the published recipe of the model, which is for ImageNet
            given = {**given, "data.path": "synthetic"}
        return find(given, options.num_images, argv=words)

    return parse(words, choose_recipe=choose)


def _check(options: argparse.Namespace) -> None:
    for name in ("epochs", "num_images", "gpu_hours_per_failure"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}: expected more than 0.")
    for name in ("price_per_gpu_hour", "watts_per_gpu"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}: expected 0 or more.")
    if options.target and options.search:
        raise ValueError(f"--target is {options.target} and --search, which compares steps: leave one out.")
    if options.epochs and options.target and Path(options.target).is_file():
        raise ValueError(f"--epochs is {options.epochs:g}, and --target {options.target} has them: leave it out.")


def _search(config: TrainConfig, cluster: "Cluster", speed: "Speed", *, json: bool) -> int:
    from largebatch.plan import text
    from largebatch.plan.search import search, shareable

    config, notes = shareable(config, cluster)
    found = search(config, cluster, speed)
    print(text.search_json(found) if json else "\n".join(text.search_lines(found, notes)))
    return int(all(one.refused for one in found))


def _parser() -> Parser:
    parser = Parser("plan", __doc__)
    add = parser.add_argument
    add("--gpus", type=int, default=8, help="GPUs, one rank each (default: 8)")
    add("--gpu", default="a100", metavar="NAME", help=f"{', '.join(DEVICES)} (default: a100)")
    add("--gpus-per-host", type=int, default=8, metavar="N", help="default: 8")
    add("--network", default="", metavar="NAME", help=f"between hosts: {', '.join(constants.LINKS)}")
    add("--cores-per-rank", type=float, default=0, metavar="N", help="CPU cores of a rank (16; --gpu cpu: 1)")
    add("--global-batch", type=int, metavar="N", help="--data.global_batch_size")
    add("--micro-batch", type=int, metavar="N", help="--data.micro_batch_size")
    add("--epochs", type=float, help="--run.duration")
    add("--num-images", type=int, default=int(constants.IMAGENET_IMAGES.value), help="training images (ImageNet's)")
    add("--price-per-gpu-hour", type=float, metavar="X", help="prints the price")
    add("--watts-per-gpu", type=float, metavar="W", help="prints the energy, that of hosts and cooling included or not")
    add(
        "--gpu-hours-per-failure",
        type=float,
        default=constants.GPU_HOURS_PER_FAILURE.value,
        metavar="H",
        help="GPU-hours between two failures (default: %(default).0f)",
    )
    add("--calibrate", type=Path, metavar="FILE", help="CSV of `largebatch.benchmark model` or `step`, of this model")
    add(
        "--target",
        metavar="TABLE",
        help="hours to a target: a CSV of batch and epochs (or steps) to it, or lars or lamb, MLPerf's points",
    )
    add("--search", action="store_true", help="list the fastest meshes that fit, and why others are refused")
    add("--json", action="store_true", help="print JSON, in seconds and bytes")
    add("--picture", type=Path, metavar="PNG", help="hours and cost over 1 to 10,000 GPUs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
