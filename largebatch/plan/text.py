"""A plan as a table, and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from largebatch.devices import GIB
from largebatch.plan import constants
from largebatch.plan.planning import Plan
from largebatch.plan.run import HOUR, RAMP
from largebatch.plan.search import Candidate
from largebatch.plan.step import Speed
from largebatch.plan.target import POINTS, Choice, Curve

TOOK = "published {} took {:.2g} to {:.2g} × the prediction (docs/planner.md)"


def ranges(plan: Plan) -> dict[str, list[float]]:
    """Return the range of a step and of the run by the errors of published runs; empty for a measured speed."""
    if plan.speed != Speed() or plan.cluster.device.kind != "cuda":
        return {}
    pairs = (("step", plan.step.seconds, constants.STEPS_TOOK), ("run", plan.run.seconds, constants.RUNS_TOOK))
    return {name: [seconds * took[0], seconds * took[1]] for name, seconds, took in pairs}


def lines(plan: Plan, *, price: float | None, watts: float | None) -> Iterator[str]:
    for part in (_batch(plan), _memory(plan), _step(plan), _run(plan, price=price, watts=watts)):
        yield from part
        yield ""
    yield from _sources(plan)


def _batch(plan: Plan) -> Iterator[str]:
    data, cluster, model = plan.config.data, plan.cluster, plan.config.model
    if plan.correction:
        yield f"note: {plan.correction}"
    if ramp := plan.config.schedule.batch_ramp:
        yield f"note: {RAMP.format(ramp)}"
    replicas = plan.config.parallel.shape().data_size(cluster.ranks)
    passes = "1 pass" if plan.passes == 1 else f"{plan.passes} passes"
    yield (
        f"{model.name} at {model.img_size} px on {cluster.ranks} × {cluster.device.name}: global batch "
        f"{data.global_batch_size} = {replicas} ranks × {data.micro_batch_size} micro-batch × {passes}"
    )


def _memory(plan: Plan) -> Iterator[str]:
    capacity = plan.cluster.device.memory
    verdict = "fits" if plan.memory.total <= capacity else "DOES NOT FIT"
    yield f"memory of a rank: {plan.memory.total / GIB:.2f} of {capacity / GIB:.1f} GiB, {verdict}"
    for name, size in asdict(plan.memory).items():
        yield f"  {name:15}{size / GIB:9.2f} GiB"
    if blocks := sorted(size for size in plan.counted.kept.values() if size >= 2**20):
        middle, most = blocks[len(blocks) // 2] / 2**20, blocks[-1] / 2**20
        yield f"  a block keeps {middle:.0f} MiB of activations, the part of the model that keeps most {most:.0f}"
    names = ("with", "without") if plan.config.model.grad_checkpointing else ("without", "with")
    largest = f"  largest micro-batch: {plan.largest} {names[0]} activation checkpointing"
    if plan.other is None:
        yield f"{largest}, which this model cannot do"
        return
    yield f"{largest}, {plan.other_largest} {names[1]}"
    yield f"  {names[1]} activation checkpointing this micro-batch needs {plan.other.total / GIB:.2f} GiB"


def _step(plan: Plan) -> Iterator[str]:
    step, images = plan.step, plan.config.data.global_batch_size
    yield f"step: {1e3 * step.seconds:.1f} ms, {images / step.seconds:,.0f} images/s"
    for name, seconds in asdict(step).items():
        yield f"  {name:15}{1e3 * seconds:9.1f} ms{100 * seconds / step.seconds:7.1f} %"
    if found := ranges(plan):
        low, high = (1e3 * seconds for seconds in found["step"])
        took = TOOK.format("steps", *constants.STEPS_TOOK)
        yield f"  expect {low:.0f} to {high:.0f} ms without a calibration: {took}"
    flops = images * plan.counted.flops / plan.counted.images / step.seconds / plan.cluster.ranks
    share = 100 * flops / plan.cluster.device.peak
    yield f"  {flops / 1e12:.1f} TFLOP/s per GPU, {share:.1f} % of the datasheet"


def _run(plan: Plan, *, price: float | None, watts: float | None) -> Iterator[str]:
    run, ranks, failures = plan.run, plan.cluster.ranks, plan.failures
    yield f"run: {run.seconds / HOUR:.2f} h, {ranks * run.seconds / HOUR:,.1f} GPU-hours"
    for name, seconds in asdict(run).items():
        yield f"  {name:15}{seconds / HOUR:9.3f} h{100 * seconds / run.seconds:7.1f} %"
    if found := ranges(plan):
        low, high = (seconds / HOUR for seconds in found["run"])
        took = TOOK.format("runs", *constants.RUNS_TOOK)
        yield f"  expect {low:.2f} to {high:.2f} h without a calibration: {took}"
    if price is not None:
        yield f"  price: {price * ranks * failures.seconds / HOUR:,.2f}, failures included"
    if watts is not None:
        yield f"  energy: {watts * ranks * failures.seconds / HOUR / 1e3:,.1f} kWh, failures included"
    need = plan.input
    yield (
        f"  images: {need.images_per_s:,.0f} per second, {need.bytes_per_s / 1e9:.2f} GB/s of JPEGs in all; "
        f"{need.cores_per_rank:.1f} CPU cores per rank decode them"
    )
    yield (
        f"  failures: one in {failures.mtbf / HOUR:.0f} h; save every {failures.interval / 60:.1f} minutes; "
        f"expected {failures.seconds / HOUR:.2f} h"
    )


def _sources(plan: Plan) -> Iterator[str]:
    cluster = plan.cluster
    yield "from:"
    yield f"  speed: {plan.speed.source}"
    if plan.speed.factor != 1:
        yield f"    a pass takes {plan.speed.factor:.2f} × the counted time"
    yield f"  {cluster.device.name}: {cluster.device.source}"
    for link in (cluster.inside, *((cluster.between,) if cluster.hosts > 1 else ())):
        yield f"  {link.name}: {link.bandwidth / 1e9:.4g} GB/s, {1e6 * link.latency:.0f} µs: {link.source}"
    assumed = dict.fromkeys(name for name, value in constants.all_constants() if constants.ASSUMED in value.source)
    yield f"  assumed, without a source: {', '.join(assumed)} (largebatch/plan/constants.py)"


def as_json(plan: Plan, *, price: float | None, watts: float | None, target: Sequence[Choice] = ()) -> str:
    data, gpu_hours = plan.config.data, plan.cluster.ranks * plan.failures.seconds / HOUR
    found: dict[str, Any] = {
        "model": plan.config.model.name,
        "gpus": plan.cluster.ranks,
        "gpu": plan.cluster.device.name,
        "batch": {
            "global": data.global_batch_size,
            "micro": data.micro_batch_size,
            "passes": plan.passes,
            "note": plan.correction,
        },
        "memory": asdict(plan.memory) | {"total": plan.memory.total, "capacity": plan.cluster.device.memory},
        "activations": dict(plan.counted.kept),
        "largest_micro_batch": plan.largest,
        "other_checkpointing": plan.other
        and {"memory": plan.other.total, "largest_micro_batch": plan.other_largest},
        "step": asdict(plan.step) | {"total": plan.step.seconds},
        "run": asdict(plan.run) | {"total": plan.run.seconds},
        "expected": ranges(plan) or None,
        "gpu_hours": gpu_hours,
        "price": None if price is None else price * gpu_hours,
        "kwh": None if watts is None else watts * gpu_hours / 1e3,
        "input": asdict(plan.input),
        "failures": asdict(plan.failures),
        "speed": asdict(plan.speed),
        "target": [asdict(choice) for choice in target],
    }
    return json.dumps(found, indent=2)


def target_lines(plan: Plan, curve: Curve, found: Sequence[Choice], *, price: float | None) -> Iterator[str]:
    first, last = curve.points[0][0], curve.points[-1][0]
    yield ""
    yield f"to the target, by {curve.source}: global batches from {first:g} to {last:g}"
    if curve.source in POINTS:
        yield "  note: MLPerf's points are of other models; the plan's own epochs at its batch are taken to reach it"
    yield f"  the other points give the epochs of one of them within a factor of {curve.factor:.2f}"
    yield f"  {'GPUs':>6}{'global batch':>14}{'epochs':>9}{'hours':>10}{'GPU-hours':>12}"
    for one in found:
        hours = one.seconds / HOUR
        yield f"  {one.gpus:6}{one.batch:14}{one.epochs:9.2f}{hours:10.2f}{one.gpus * hours:12.1f}"
    low, high = constants.RUNS_TOOK if ranges(plan) else (1.0, 1.0)
    for name, best in best_of(found).items():
        hours = best.seconds / HOUR
        gpus = f"{best.gpus} GPU{'s' * (best.gpus > 1)}"
        paid = "" if price is None else f", price {price * best.gpus * hours:,.2f}"
        yield (
            f"{name}: {gpus}, global batch {best.batch}: {hours:.2f} h, failures included{paid}; "
            f"expect {low * hours / curve.factor:.2f} to {high * hours * curve.factor:.2f} h"
        )


def best_of(found: Sequence[Choice]) -> dict[str, Choice]:
    cheapest, fastest = min(found, key=lambda one: one.gpus * one.seconds), min(found, key=lambda one: one.seconds)
    return {"cheapest": cheapest, "fastest": fastest}


def search_lines(candidates: Sequence[Candidate], notes: Sequence[str] = (), *, shown: int = 12) -> Iterator[str]:
    best = [one for one in candidates if one.step]
    if best:
        yield f"{len(best)} of {len(candidates)} meshes fit; the fastest is: {name_of(best[0])}."
    else:
        yield f"None of {len(candidates)} meshes can be had; {name_of(candidates[0])}: {candidates[0].refused}"
    yield from (f"note: {note}" for note in notes)
    if best:
        yield f"{'mesh':44}{'micro-batch':>12}{'ms per step':>13}{'GiB per rank':>14}"
    for one in best[:shown]:
        assert one.step is not None
        yield f"{name_of(one):44}{one.micro_batch_size:12}{1e3 * one.step.seconds:13.1f}{one.memory / GIB:14.2f}"
    reasons: dict[str, list[str]] = {}
    for one in candidates:
        if one.refused:
            reasons.setdefault(one.refused, []).append(name_of(one))
    frequent = sorted(reasons.items(), key=lambda item: -len(item[1]))
    for reason, names in frequent[: shown // 2]:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"refused: {names[0]}{others}: {reason}"
    if rest := sum(len(names) for _, names in frequent[shown // 2 :]):
        yield f"refused: {rest} more, each with its reason in --json"


def search_json(candidates: Sequence[Candidate]) -> str:
    found = [
        {
            "mesh": name_of(one),
            "micro_batch": one.micro_batch_size,
            "step": one.step.seconds if one.step else None,
            "memory": one.memory or None,
            "refused": one.refused,
        }
        for one in candidates
    ]
    return json.dumps(found, indent=2)


def name_of(candidate: Candidate) -> str:
    parallel, tensor = candidate.parallel, candidate.parallel.tensor
    sizes = {"pipeline": parallel.pipeline, "sequence": parallel.sequence, f"tensor {tensor.mode}": tensor.size}
    mesh = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data parallel alone"
    return mesh + (", ZeRO" if parallel.zero else "")
