"""Trials with a planted fault: a run that ends as promised, and one that is disturbed again and again."""

import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch import launch
from runs import SMALL, different, rows, weights

from largebatch import checkpoint
from tests.reliability.campaign import Size, Trial
from tests.reliability.injector import AFTER_STEP, INSIDE, PHASES, VARIABLE, Fault

SMALLER = ["--data.global_batch_size", "16", "--data.micro_batch_size", "4", "--model.drop_path_rate", "0.1"]
AS_USERS = ["--log.to", "tensorboard"]  # SMALL leaves it out
EVERY_STEP = ["--run.eval_every", "1 steps", "--checkpoint.every", "1 steps", "--data.eval_batch_size", "90"]
WAIT_S, HANG_S = 4, 8  # limits of the run for one rank that does not come, and for all that hang
START_S = 25  # the same until the first step is done, when some come late; below the 30 s that Gloo itself waits
ENDS_S = 30.0  # from a fault to the end of the last process, the limits above included
TORCHRUN_S = 30  # until it sends SIGKILL to a rank that does not obey SIGTERM
LIMITS = ["--horovod.stall_limit_s", str(WAIT_S), "--horovod.hang_limit_s", str(HANG_S)]
TOLD = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(WAIT_S)}
SAME = 1e-5  # relative difference of losses, from the order of sums
PREEMPTED = 75
STOPS = ("SIGTERM", "SIGUSR1")
Trials = Iterator[Trial]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int
    output: str
    seconds: float  # from the fault to the end of all processes

    @property
    def end(self) -> str:
        """The end of the output, for a report."""
        return self.output[-3000:]


def train(
    folder: Path, steps: int, *options: str, ranks: int, fault: Fault | None = None, launcher: str = "mpirun"
) -> Outcome:
    """Train, or go on with a run, with a checkpoint after each step.

    A fault that others wait for is given short limits of waiting; others are not, so that a busy machine ends no run.
    """
    for planted in folder.glob("planted.*"):
        planted.unlink()
    place = ["--run.duration", f"{steps} steps", "--run.folder", str(folder)]
    waits = fault is not None and fault.kind in ("hang", "SIGSTOP")
    limits, environment = (LIMITS, TOLD) if waits else ([], {})
    if waits and fault.phase in INSIDE:
        limits = [*limits, "--horovod.start_limit_s", str(START_S)]
    given = [*SMALL, *AS_USERS, *SMALLER, *EVERY_STEP, *limits, *place, *options]
    arguments = ["-m", "tests.reliability.injector", *given]
    environment = environment | ({VARIABLE: str(fault)} if fault else {})
    code, output = launch(arguments, ranks=ranks, launcher=launcher, timeout_s=900, environment=environment)
    ended = time.time()
    times = [float(planted.read_text().split()[1]) for planted in folder.glob("planted.*")]
    return Outcome(code, output, ended - min(times, default=ended))


def left_alive(folder: Path) -> list[int]:
    """Return the processes with a fault that do not end; `launch` has waited for the output of all others."""
    pids = [int(planted.read_text().split()[0]) for planted in folder.glob("planted.*")]
    limit = time.monotonic() + ENDS_S
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > limit:
            return alive
        time.sleep(0.02)
    return []


# -- a run that ends as promised -------------------------------------------------------------------------------------


def in_first_step(fault: Fault) -> bool:
    """Return whether the limit of the start may hold: no step is done. (The loader is ahead of the step.)"""
    return fault.phase in INSIDE and fault.phase not in AFTER_STEP


def explains(fault: Fault, output: str) -> bool:
    """Return whether the output says who failed, and how."""
    if fault.kind == "raise":
        return "RuntimeError: planted" in output and f"rank {fault.rank} of " in output
    if fault.kind == "SIGKILL":
        return bool(re.search(r"signal 9|SIGKILL|Killed|status code 137", output))
    if fault.kind in STOPS:
        # At the start rank 0 alone has words; for another rank the launcher has.
        return bool(re.search(rf"{fault.kind} |(status code |errorcode |exitcode *: ){PREEMPTED}\b", output))
    horovod = rf"Missing ranks:\n{fault.rank}!: .*\n.* is stalled for longer than {WAIT_S} seconds"  # it may come first
    waited = f"({WAIT_S}|{START_S})" if in_first_step(fault) else WAIT_S
    named = re.findall(r"largebatch: (rank .*) (?:is|are) (?:behind|stopped)", output)
    others = [one for one in named if fault.rank is not None and not re.fullmatch(rf"rank {fault.rank} on \S+", one)]
    why = re.search(rf"waited {waited} s for the others|made no progress for {HANG_S} s|{horovod}", output)
    return why is not None and not others


def ending(fault: Fault, folder: Path, *, ranks: int, launcher: str) -> str:
    """Train with a fault; return what was not as promised."""
    shutil.rmtree(folder, ignore_errors=True)  # of a trial that was broken off
    run = train(folder, 2, ranks=ranks, fault=fault, launcher=launcher)
    # Nothing is left to stop, or one step, which may be done before all ranks know of the signal.
    whole = fault.phase == "end" or (fault.phase in AFTER_STEP and run.code == 0 and newest(folder) == 2)
    over = fault.kind in STOPS and whole
    ends_s = ENDS_S + START_S * in_first_step(fault)
    ends_s += TORCHRUN_S * (launcher == "torchrun" and fault.kind == "SIGSTOP")
    wrong = {
        "the fault did not happen": not list(folder.glob("planted.*")),
        f"exit code {run.code}": (run.code == 0) != over,
        f"not {PREEMPTED}": fault.kind in STOPS and launcher == "mpirun" and not over and run.code != PREEMPTED,
        f"{run.seconds:.0f} s until the end": run.seconds > ends_s,
        "processes are left": bool(left_alive(folder)),
        "the output does not say why": not over and not explains(fault, run.output),
    }
    said = ", ".join(sentence for sentence, is_so in wrong.items() if is_so)
    return f"{said}: {run.end}" if said else ""


def matrix(size: Size, kinds: Sequence[str], *, gate: int, who: Sequence[str], launchers: Sequence[str]) -> Trials:
    """Yield a trial for each kind, phase, rank and launcher; as a gate, `gate` of them, drawn, on two ranks."""
    faults = {
        kind: [Fault.read(f"{rank} {phase} {int(phase in INSIDE)} {kind}") for phase in PHASES for rank in who]
        for kind in kinds
    }
    chosen = [(fault, launcher) for kind in kinds for fault in faults[kind] for launcher in launchers]
    if not size.full:
        draws = random.Random(gate)
        two = {kind: [fault for fault in faults[kind] if fault.rank in (None, 0, 1)] for kind in kinds}
        chosen = [(draws.choice(two[kinds[n % len(kinds)]]), draws.choice(launchers)) for n in range(gate)]
    ranks = 4 if size.full else 2
    for fault, launcher in chosen:
        name = f"{fault} {launcher}"
        yield Trial(name, partial(ending, fault, size.folder / name.replace(" ", "_"), ranks=ranks, launcher=launcher))


# -- one run, disturbed again and again ------------------------------------------------------------------------------


def chain(size: Size, kinds: Sequence[str], *, links: int, seed: int, world: Callable[[int], int]) -> Trials:
    """Yield the trials of one run: undisturbed, with one fault after the other, and at last to its end.

    kinds: of the faults; empty: --run.max_steps ends the run. world: number of a link -> its number of ranks.
    """
    steps, folder, undisturbed = 2 * links + 4, size.folder / "disturbed", size.folder / "undisturbed"
    phases = INSIDE if "SIGKILL" in kinds else ("start", "data", *INSIDE)
    yield Trial("undisturbed", lambda: train_undisturbed(undisturbed, steps))
    for number in range(links):
        draws, ranks = random.Random(f"{seed} {number}"), world(number)
        ahead = draws.randrange(1, 3)
        if not kinds:
            yield Trial(f"{number + 1}: {ahead} steps on {ranks}", partial(go_on, folder, steps, ahead, ranks=ranks))
            continue
        phase = draws.choice(phases)
        fault = Fault(draws.randrange(ranks), phase, ahead * (phase in INSIDE), draws.choice(kinds))
        yield Trial(f"{number + 1}: {fault}", partial(disturb, folder, steps, fault, ranks=ranks))
    yield Trial("to the end", lambda: to_the_end(folder, undisturbed, steps, exact=bool(kinds)))


def train_undisturbed(folder: Path, steps: int) -> str:
    run = train(folder, steps, ranks=2)
    return "" if run.code == 0 else run.end


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one; AssertionError if one is damaged."""
    paths = checkpoint.checkpoints(folder)
    bad = [path.name for path in paths if checkpoint.why_invalid(path)]
    assert not bad, f"damaged checkpoints {bad}"
    return max((int(path.name) for path in paths), default=0)


def go_on(folder: Path, steps: int, ahead: int, *, ranks: int) -> str:
    """Go on with a run for some steps."""
    step = min(newest(folder) + ahead, steps - 1)
    run = train(folder, steps, "--run.max_steps", str(step), ranks=ranks)
    return "" if run.code == 0 and newest(folder) == step else f"exit code {run.code}: {run.end}"


def disturb(folder: Path, steps: int, fault: Fault, *, ranks: int) -> str:
    """Go on with a run until a fault, whose step counts from the newest checkpoint; return what was lost."""
    before = newest(folder)
    step = min(before + fault.step, steps - 1) if fault.phase in INSIDE else 0
    run = train(folder, steps, ranks=ranks, fault=replace(fault, step=step))
    if not list(folder.glob("planted.*")):
        return f"the fault did not happen: {run.end}"
    done = step - (fault.phase not in AFTER_STEP) if fault.phase in INSIDE else before  # steps
    # A kill may come while the newest checkpoint is written. A run that is told to stop saves what it has done.
    least = max(before, done - 1 if fault.kind == "SIGKILL" else done)
    right = run.code != 0 if fault.kind == "SIGKILL" else run.code == PREEMPTED
    if right and newest(folder) >= least:
        return ""
    return f"exit code {run.code}, and the newest checkpoint is of step {newest(folder)}, not {least}: {run.end}"


def to_the_end(folder: Path, undisturbed: Path, steps: int, *, exact: bool) -> str:
    """Let the run end; compare it with the one that was not disturbed, bit for bit or by its losses."""
    run = train(folder, steps, ranks=2)
    if run.code != 0:
        return run.end
    told = [row["step"] for row in rows(folder, "steps.csv")]
    if told != [str(step) for step in range(1, steps + 1)]:
        return f"steps.csv has the steps {told}"
    if exact:
        return ", ".join(different(weights(folder), weights(undisturbed)))
    ours, theirs = ([float(row["loss"]) for row in rows(one, "steps.csv")] for one in (folder, undisturbed))
    apart = max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
    return "" if apart <= SAME else f"the losses are {apart:.1e} apart"
