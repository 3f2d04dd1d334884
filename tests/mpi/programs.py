"""What tests run on ranks: `python -m tests.mpi.programs NAME arguments...`, where NAME is a function of this file.

Those of `FAULTS` plant something into a training run, whose options are the arguments: `fails_in_step_2 --model ...`;
several are joined by commas, and a number is set by "=": `signals_in_pass=3,tells_its_end --model ...`. With
`find_batch RUN ...` they are planted into a search for a batch.
"""

import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from largebatch.config.horovod import HorovodConfig
from largebatch.ranks import Ranks, session

# -- ranks -----------------------------------------------------------------------------------------------------------


def places(what: str = "") -> None:
    """Print every rank's place. fails: rank 1 fails the first time that torchrun starts the ranks.

    torch: of torch.distributed, mixed: on rank 1 alone.
    """
    before = dict(os.environ)
    by_torch = what == "torch" or what == "mixed" and os.environ["OMPI_COMM_WORLD_RANK"] == "1"
    # The one that tells whom it could not meet is not to be ended by the other.
    limits = HorovodConfig(start_limit_s=5 if by_torch else 60) if what == "mixed" else None
    with session(ranks="torch" if by_torch else "auto", horovod=limits) as comm:
        if what == "fails" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and comm.rank == 1:
            raise RuntimeError("planted")
        everyone = comm.allgather_object((comm.rank, comm.size, comm.local_rank, comm.local_size), name="places")
        if comm.rank == 0:
            print(f"places {everyone}", flush=True)
    left = {name for name, value in os.environ.items() if name.startswith("HOROVOD_") and before.get(name) != value}
    left -= {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"}
    assert not left, f"left in the environment: {sorted(left)}"


def listens(*parts: str) -> None:
    """Print the addresses at which each rank listens. "parallel": also for the ranks of a replica."""
    import psutil

    from largebatch.parallel.mesh import start_torch_distributed

    with session() as comm:
        if "parallel" in parts:
            start_torch_distributed(comm, torch.device("cpu"))
        sockets = psutil.Process().net_connections(kind="inet")
        mine = sorted({one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN})
        everyone = comm.allgather_object(mine, name="listens")
        if comm.rank == 0:
            print(f"listens {everyone}", flush=True)


def waits_for_strangers(folder: str) -> None:
    """Reduce a gradient again and again until there is a file; say whether each mean was right."""
    with session() as comm:
        model, steps = torch.nn.Linear(2000, 200), 0
        optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model)
        while not any(comm.allgather_object(os.path.exists(f"{folder}/go on"), name="go on")) or steps < 200:
            (model.weight.sum() * comm.rank).backward()
            optimizer.synchronize()
            assert bool((model.weight.grad == (comm.size - 1) / 2).all())
            optimizer.zero_grad()
            steps += 1
        print("the sum is right", flush=True)


def cores(*options: str) -> None:
    """Set up the ranks as training does; the line of each host, and the warnings of all ranks."""
    from largebatch.start import set_up
    from largebatch.train import read

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
    config = read(["--run.device", "cpu", *options])
    with session(config) as comm:
        logging.getLogger().setLevel(logging.INFO if comm.rank == 0 else logging.WARNING)
        set_up(config, comm)
        when = "has decided already" if "torch._inductor.config" in sys.modules else "has not decided yet"
        processes = os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        logging.getLogger().info("torch %s, and will compile with %s", when, processes)


def one_rank(what: str) -> None:
    """Rank 1 "sleeps", "is stopped" or "is late" while the others wait for it, or "stops mpirun" before all end."""
    with session(horovod=HorovodConfig(stall_limit_s=4)) as comm:
        comm.barrier(name="begin")
        if comm.rank == 1 and what == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if comm.rank == 1 and what in ("sleeps", "is stopped"):  # Open MPI wakes a stopped rank a second before its end
            time.sleep(600)
        if comm.rank == 1 and what == "is late":
            time.sleep(2)
        comm.allreduce(torch.ones(1), name="middle")
        print("done", flush=True)
        if comm.rank == 1 and what == "stops mpirun":
            os.kill(os.getppid(), signal.SIGSTOP)


def late_at_the_start() -> None:
    """Rank 1 comes to the first step after more than the limit of later waits, and never to the second."""
    with session(horovod=HorovodConfig(start_limit_s=60, stall_limit_s=3)) as comm:
        if comm.rank == 1:
            time.sleep(5)
        model = torch.nn.Linear(2, 2)
        optimizer = comm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for name in ("first", "second"):
            comm.barrier(name=f"{name} step")
            model(torch.ones(1, 2)).sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            print(f"{name} step done", flush=True)
            time.sleep(600 * comm.rank)


def waits_for_ever() -> None:
    """Rank 0 waits in a barrier that rank 1 does not reach, and tells when it has heard a signal."""
    from largebatch.ranks import signals as listening

    listening.ONCE_S = 0.0
    with listening.Signals() as signals, session() as comm:

        def tell() -> None:
            while signals.first is None:
                time.sleep(0.01)
            print("rank 0 has heard.", flush=True)

        if comm.rank == 0:
            threading.Thread(target=tell, daemon=True).start()
            print(f"rank 0 has pid {os.getpid()}.", flush=True)
            comm.barrier(name="never")
        time.sleep(1000)


def ends(how: str) -> None:
    """End a session "by Ctrl-C", or start one "inside" of another or "after" it."""
    with session():
        if how == "by Ctrl-C":
            raise KeyboardInterrupt
        if how == "inside":
            with session():
                print("two sessions")
    with session():
        print("two sessions")


def mistaken(how: str) -> None:
    """A loop of one's own in which each rank makes a mistake, or the last one alone ("one rank")."""
    from torch.optim import SGD

    with session() as comm:
        model = torch.nn.Linear(3, 2)
        optimizer = comm.wrap(SGD(model.parameters(), lr=0.1), model, passes=2)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        if how == "third backward" or how == "one rank" and comm.rank == comm.size - 1:
            model(torch.ones(2, 3)).sum().backward()
        if how == "zero_grad":
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] /= 1 + comm.rank * (how == "rates")
        optimizer.step()


def exits(code: str) -> None:
    """Each rank ends inside the session by itself."""
    with session() as comm:
        comm.barrier(name="begin")
        sys.exit(int(code))


def holds_shared_memory() -> None:
    """Hold a segment, a semaphore and a folder, name them with all that is mapped of /dev/shm, and never end."""
    import multiprocessing
    import tempfile
    from multiprocessing.shared_memory import SharedMemory

    with session() as comm:
        comm.barrier(name="begin")
        segment = SharedMemory(create=True, size=4096)
        multiprocessing.set_start_method("spawn")  # after a fork, a semaphore needs no name
        semaphore = multiprocessing.Semaphore()
        with open("/proc/self/maps") as maps:
            mapped = {line.split()[-1] for line in maps if " /dev/shm/" in line and "(deleted)" not in line}
        mapped.add(f"/dev/shm/sem.{semaphore._semlock.name[1:]}")  # it is mapped under a name that is gone
        os.write(1, f"held: {' '.join(sorted(mapped))} {tempfile.mkdtemp()}\n".encode())
        time.sleep(1000)
        del segment


# -- Horovod's settings ----------------------------------------------------------------------------------------------


def reduces_fifty() -> None:
    """Fifty reductions that wait for each other."""
    import horovod.torch as hvd

    with session():
        handles = [hvd.allreduce_async(torch.ones(1000), name=f"gradient {k}", op=hvd.Sum) for k in range(50)]
        assert all(torch.equal(hvd.synchronize(handle), torch.full((1000,), 2.0)) for handle in handles)


def autotunes() -> None:
    import horovod.torch as hvd

    with session():
        for _ in range(100):
            assert torch.equal(hvd.allreduce(torch.ones(1000), name="gradient", op=hvd.Sum), torch.full((1000,), 2.0))


# -- replicas --------------------------------------------------------------------------------------------------------


def reduces_among_data_ranks() -> None:
    """Two ranks to a replica: each has another part of the model, and reduces it with those that have the same."""
    from largebatch.config.parallel import Shape
    from largebatch.optim import Lamb

    with session(shape=Shape({"tensor": 2})) as comm:
        assert (comm.data_rank, comm.model_rank) == divmod(comm.rank, 2) and comm.data_size == 2
        model = torch.nn.Linear(3, 2 + comm.model_rank)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 10.0 + comm.rank)
        comm.broadcast_model(model)
        assert all(bool((parameter == 10 + comm.model_rank).all()) for parameter in model.parameters())
        optimizer = comm.wrap(Lamb(model.parameters()), model, passes=2)
        for _ in range(2):
            (model(torch.ones(1, 3)) * (1 + comm.rank)).sum().backward()
        optimizer.synchronize()
        mean = 2 * sum(1 + rank for rank in range(4) if rank % 2 == comm.model_rank) / 2
        assert all(bool((parameter.grad == mean).all()) for parameter in model.parameters())
        total = comm.allreduce(torch.ones(1), name="all")
        print(f"sound {int(total)}", flush=True)


def reduces_by_rank(kind: str) -> None:
    """Reduce whole numbers, another one of each rank, layer and step; rank 0 leaves out a layer in the first step."""
    from largebatch.ranks import buckets

    buckets.SMALLEST = 2**15  # of two layers, so the last one of a bucket may be the one that is left out
    with session() as comm:
        device = comm.device(kind)
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(5)).to(device)
        comm.broadcast_model(layers)
        optimizer = comm.wrap(torch.optim.SGD(layers.parameters(), lr=0.125), layers)
        assert 1 < len(optimizer.trained.buckets) < 2 * len(layers)
        for step in range(3):
            used = {rank: {*range(5)} - ({2} if step == rank == 0 else set()) for rank in range(comm.size)}
            mine = {number: float((number + 1) * 10**comm.rank + step) for number in used[comm.rank]}
            sum(layers[number](torch.full((1, 64), mine[number], device=device)).sum() for number in mine).backward()
            optimizer.synchronize()
            for number, layer in enumerate(layers):
                values = [(number + 1) * 10**rank + step for rank in range(comm.size) if number in used[rank]]
                assert layer.weight.grad is not None and layer.weight.grad.device == device
                assert bool((layer.weight.grad == sum(values) / comm.size).all()), (step, number)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        whole = comm.allreduce(torch.full((3,), 10.0**comm.rank, device=device), name="all")
        assert whole.tolist() == [sum(10**rank for rank in range(comm.size))] * 3
        print(f"sums are exact on rank {comm.rank}, {device.type}", flush=True)


def validates(*options: str) -> None:
    """Validate, and say whether Python searches for garbage meanwhile."""
    from largebatch import validate

    evaluate = validate.evaluate_weights

    def tells(*arguments, **named):
        print(f"searches {gc.isenabled()}", flush=True)
        return evaluate(*arguments, **named)

    validate.evaluate_weights = tells
    validate.main(options)


# -- several runs in one launch --------------------------------------------------------------------------------------


def trials(file: str) -> None:
    """Train for each [options, environment] of a JSON file, each time in a child of its own."""
    from largebatch import train

    with open(file) as text:
        wanted = json.load(text)
    for options, environment in wanted:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            os.environ.update(environment)
            train.main(options)
            sys.exit("it trains")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"trial ends with {code}", flush=True)


def muon_goes_on(folder: str, steps: str) -> None:
    """Train a ViT with Muon from the newest checkpoint to this step; any number of ranks computes the same bits.

    The gradient of a micro-batch is rounded to a multiple of 2^-30, so that float64 adds such gradients exactly.
    """
    from largebatch import checkpoint
    from largebatch.config import RunConfig, TrainConfig, dump
    from largebatch.data.order import Plan
    from tests.mpi.ranks.parts import small_trainer, tiny_vit

    plan = Plan(num_samples=50, global_batch_size=16, micro_batch_size=4, num_images=16 * 6, seed=0)
    config, model = TrainConfig(run=RunConfig(folder=folder)), tiny_vit(pos_drop_rate=0.1, proj_drop_rate=0.3)
    with session(deterministic=True) as comm:
        options = {"optimizer_name": "muon", "split_qkv": True, "dtype": torch.float64}
        trainer = small_trainer(comm, plan, passes=4 // comm.size, model=model, **options)
        unit = 2.0**-30 * comm.size
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: (gradient / unit).round() * unit)
        checkpoint.resume(config, trainer)
        began = trainer.state.step
        trainer.fit(max_steps=int(steps))
        if comm.rank == 0:
            parts = {"model": model, "optimizer": trainer.optimizer, "scaler": trainer.scaler, "state": trainer.state}
            checkpoint.save(folder, checkpoint.take_snapshot(**parts, config_text=dump(config)))
            print(f"{comm.size} ranks of {comm.kind}: steps {began} to {trainer.state.step}", flush=True)


# -- faults of a training run ----------------------------------------------------------------------------------------


def fails_in_step_2() -> None:
    """Rank 1 alone loses its images."""
    before_step(lambda trainer: fail() if (trainer.comm.rank, trainer.state.step) == (1, 2) else None)


def fail() -> None:
    raise RuntimeError("planted")


def signals_in_pass(step: int) -> None:
    """SIGUSR1 comes to rank 1 in the first pass of this step."""
    signals_where(lambda trainer: trainer.state.step == step - 1)


def signals_at_batch(size: int) -> None:
    """SIGUSR1 comes to rank 1 in the first pass at this global batch."""
    signals_where(lambda trainer: trainer.plan.batch_size(trainer.state.step) == size)


def signals_where(holds: Callable) -> None:
    from largebatch import engine

    forward_backward = engine.Trainer.forward_backward

    def signalling(self, batch, weight):
        if holds(self):
            wait_for_agreement(signal_to=1, rank=self.comm.rank)
        return forward_backward(self, batch, weight)

    engine.Trainer.forward_backward = signalling


def signals_in_evaluation(step: int) -> None:
    """SIGUSR1 comes to rank 1 in a batch of the evaluation after this step."""
    from largebatch import engine

    evaluate = engine.evaluate

    def signalling(model, batches, *, comm, **options):
        return evaluate(model, waiting(batches, comm.rank), comm=comm, **options)

    def waiting(batches, rank):
        for number, batch in enumerate(batches):
            if number == 1 and TRAINERS[0].state.step == step:
                wait_for_agreement(signal_to=1, rank=rank)
            yield batch

    before_step(lambda trainer: TRAINERS.append(trainer))
    engine.evaluate = signalling


TRAINERS: list = []


def wait_for_agreement(*, signal_to: int, rank: int) -> None:
    """Send SIGUSR1 to one rank, and wait, on each rank, until all have agreed where to stop."""
    import gc

    from largebatch.ranks.stop_points import StopPoints

    every = [one for one in gc.get_objects() if isinstance(one, StopPoints)]
    (points,) = [one for one in every if not one._closing.is_set()]
    if not points._decided.is_set():
        if rank == signal_to:
            os.kill(os.getpid(), signal.SIGUSR1)
        points._decided.wait()


def signals_at_the_end() -> None:
    """SIGUSR1 comes to rank 1 after its last step."""
    from largebatch import engine

    fit = engine.Trainer._train_until

    def signalling(self, *arguments):
        fit(self, *arguments)
        if self.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    engine.Trainer._train_until = signalling


def signals_in_indexing() -> None:
    """SIGTERM comes to the rank that reads the shards, and the others wait for it."""
    from largebatch.data import scan

    def signalling(path: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    scan.scan_shard = signalling


def is_slow() -> None:
    """So that a run of a few steps is still there when a signal comes."""
    before_step(lambda trainer: time.sleep(0.1))


def is_slow_on_rank_1() -> None:
    """Its passes take 150 ms longer than those of the others."""
    from largebatch import engine

    forward_backward = engine.Trainer.forward_backward

    def slow(self, batch, weight):
        time.sleep(0.15 * (self.comm.rank == 1))
        return forward_backward(self, batch, weight)

    engine.Trainer.forward_backward = slow


def halves_after_step(after: int) -> None:
    """The learning rate, as after a divergence."""

    def halving(trainer) -> None:
        if trainer.state.step == after:
            trainer.state.halvings += 1

    before_step(halving)


def before_step(act: Callable) -> None:
    from largebatch import engine

    step = engine.Trainer.train_step

    def acting(self, batches):
        act(self)
        return step(self, batches)

    engine.Trainer.train_step = acting


def is_told_to_end_when_done() -> None:
    """SIGTERM comes to each rank when Horovod has ended."""
    from largebatch.ranks import sessions
    from largebatch.ranks.signals import Signals

    listening: list[Signals] = []
    listen, end = Signals._listen, sessions._end

    def listens(self) -> None:
        listening.append(self)
        listen(self)

    def ends(comm: Ranks) -> None:
        end(comm)
        os.kill(os.getpid(), signal.SIGTERM)
        while not listening[0].first:
            time.sleep(0.01)

    Signals._listen, sessions._end = listens, ends


def tells_of_searches() -> None:
    """In the first step, whether Python searches for garbage, among all objects, and has left that of the start.

    A run of one rank ends there.
    """
    from largebatch import train

    before, prepare = gc.get_freeze_count(), train.prepare_images
    garbage: list[weakref.ref] = []
    found: list[tuple] = []

    def leaves_garbage(*arguments):
        print(f"imports spared {gc.get_freeze_count() > before}", flush=True)
        ring: set = {type("Ring", (), {})}  # a class refers to itself
        garbage.extend(map(weakref.ref, ring))
        found.append(prepare(*arguments))
        return found[0]

    def tell(trainer) -> None:
        every = any(thing is found[0] for thing in gc.get_objects())
        print(f"searches {gc.isenabled()}, all {every}, left {garbage[0]() is not None}", flush=True)
        os._exit(0)

    train.prepare_images = leaves_garbage
    before_step(tell)


def flips_a_bit_after_step(after: int) -> None:
    """The lowest bit of one of rank 1's weights."""

    def flipping(trainer) -> None:
        if (trainer.comm.rank, trainer.state.step) == (1, after):
            trainer.model.head.weight.data.view(-1).view(torch.int32)[7] ^= 1

    before_step(flipping)


def spoils_an_image_in_step(step: int) -> None:
    """An image of micro-batch 1, which is rank 1's, has a NaN after decoding; its number is printed."""
    from largebatch.data.dali import TrainLoader

    decode = TrainLoader.__next__

    def spoilt(self):
        batch = decode(self)
        if (batch.step, batch.number) == (step, 1):
            batch.images[2, 0, 5, 5] = float("nan")
            print(f"spoilt sample {batch.samples[2]}.", flush=True)
        return batch

    TrainLoader.__next__ = spoilt


def waits_in_step(after: int) -> None:
    """When so many steps are done, rank 0 says so in the run folder, waits there for a file "go", and is killed."""
    from largebatch import hooks

    def waiting(trainer) -> None:
        if (trainer.comm.rank, trainer.state.step) == (0, after):
            folder = next(Path(hook.folder) for hook in trainer.hooks if isinstance(hook, hooks.Checkpoint))
            (folder / "waits").touch()
            while not (folder / "go").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

    before_step(waiting)


def tells_its_end() -> None:
    """Each rank prints the step at which its run ended."""
    from largebatch import engine

    fit = engine.Trainer.fit

    def reporting(self, **options):
        reason = fit(self, **options)
        print(f"rank {self.comm.rank} ended at step {self.state.step}.", flush=True)
        return reason

    engine.Trainer.fit = reporting


def hangs_in_the_loader() -> None:
    """Every rank."""
    from largebatch.data import dali

    dali.TrainLoader.__next__ = lambda self: time.sleep(1000)


def hangs_in_indexing() -> None:
    """Every rank, in a thread that reads a shard or in waiting for the rank that reads it."""
    from largebatch.data import scan

    scan.scan_shard = lambda path: time.sleep(1000)


def hangs_in_the_evaluation() -> None:
    """Every rank, in its second batch."""
    from largebatch import evaluation

    count, batches = evaluation.count_correct, []

    def counting(logits, labels):
        batches.append(1)
        return count(logits, labels) if len(batches) < 2 else time.sleep(1000)

    evaluation.count_correct = counting


def has_a_long_margin() -> None:
    """So long that the end of the job is near at once."""
    from largebatch.hooks import stop_early

    stop_early.MARGIN_S = 100000.0


def writes_slowly() -> None:
    """A checkpoint takes six seconds; after the first step a rank may wait for the others for three."""
    from largebatch.checkpoint import store

    write = store._write

    def slow(*arguments) -> None:
        time.sleep(6)
        write(*arguments)

    store._write = slow
    before_step(lambda trainer: setattr(trainer.comm._watchdog, "stall_limit_s", 3.0) if trainer.state.step else None)


def cannot_build_on_rank_1() -> None:
    from largebatch.assembly import replica

    whole = replica.build_model

    def failing(*arguments, **options):
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise ValueError("no such file on this host")
        return whole(*arguments, **options)

    replica.build_model = failing


def has_no_compiler_on_rank_1() -> None:
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.environ["CXX"] = "no-such-compiler"


def shares_a_gpu() -> None:
    """Planted identities, as a machine for tests has no GPUs."""
    from largebatch.ranks import placement

    placement.gpu_names = lambda device: ("GPU-1", "0000:1b:00")


def on_export(act: Callable) -> None:
    from torch.profiler import profile

    export = profile.export_chrome_trace
    profile.export_chrome_trace = lambda self, path: act(lambda: export(self, path), path)


def stops_half_through_its_trace() -> None:
    def stopping(export: Callable, path: str) -> None:
        export()
        with open(path, "r+") as file:
            file.truncate(1000)
        print("half written", flush=True)
        time.sleep(1000)

    on_export(stopping)


def may_not_write_its_trace() -> None:
    """Files may not grow beyond 20 kB while it is written; the profiler raises nothing."""

    def limited(export: Callable, path: str) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, before[1]))
        export()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    on_export(limited)


FAULTS = (
    fails_in_step_2, signals_in_pass, signals_at_batch, signals_in_evaluation, signals_at_the_end, signals_in_indexing,
    is_slow, is_slow_on_rank_1, flips_a_bit_after_step, spoils_an_image_in_step, waits_in_step, tells_its_end,
    has_a_long_margin, cannot_build_on_rank_1, has_no_compiler_on_rank_1, shares_a_gpu, stops_half_through_its_trace,
    may_not_write_its_trace, halves_after_step, hangs_in_the_loader, hangs_in_indexing, hangs_in_the_evaluation,
    writes_slowly, tells_of_searches, is_told_to_end_when_done,
)  # fmt: skip


def main(name: str, *arguments: str) -> None:
    known = {function.__name__: function for function in FAULTS}
    planted = [fault.partition("=") for fault in name.split(",")]
    if planted[0][0] not in known:
        globals()[name](*arguments)
        return
    for fault, _, number in planted:
        function = known[fault]
        function(*map(int, filter(None, [number])))
    from largebatch import find_batch, train

    if arguments[0] == "find_batch":
        return find_batch.main(arguments[1:])
    train.main(list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
