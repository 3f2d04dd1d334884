"""The command line: all checks in order, what they found, and an exit code."""

import argparse
import sys
import time
from collections.abc import Iterator

from largebatch import doctor
from largebatch.doctor import installation, launches, machine
from largebatch.doctor.result import Output, Result


def examine(*, device: str = "auto", limit_s: float = 120) -> Iterator[Result]:
    """All results in order; launches are left out when what they need has already failed."""
    began = time.monotonic()
    facts, output = installation.horovod_facts(limit_s=limit_s)
    import_s = time.monotonic() - began
    all_ok = True
    for result in before_launching(facts, output, device=device, limit_s=limit_s):
        all_ok &= result.ok
        yield result
    if all_ok:
        limit_s = min(limit_s, 10 + 7 * import_s)  # where importing is slow, so is launching
        yield from launch_each(device=launches.device_for_launches(facts, device), limit_s=limit_s)
    else:
        cause = "not tried, as a check above failed"
        yield Result(f"{launches.RANKS}-process allreduce", False, cause=cause, fix="the fix above")


def before_launching(facts: dict, output: Output, *, device: str, limit_s: float) -> Iterator[Result]:
    """What can be known without starting ranks; what needs Horovod only where it loads."""
    for check in machine.CHECKS:
        yield check()
    yield installation.check_shadowing()
    yield installation.check_versions()
    yield installation.check_imports(limit_s=limit_s)
    if "built_for" in facts:
        yield installation.check_built_for(facts)
    horovod = installation.check_horovod(facts, output)
    yield horovod
    if horovod.ok:
        yield installation.check_controllers(facts)
        yield installation.check_launchers(facts)
        yield machine.check_gpu(facts, device)
    yield installation.check_compiler()


def launch_each(*, device: str, limit_s: float) -> Iterator[Result]:
    """Two processes under each launcher; horovodrun starts mpirun, so what ails mpirun is said once."""
    failed = set()
    for launch in launches.LAUNCHES:
        if launch == "horovodrun" and "mpirun" in failed:
            continue
        result = launches.check_allreduce(launch, device=device, limit_s=limit_s)
        if not result.ok:
            failed.add(launch)
        yield result


def main(arguments: list[str] | None = None) -> int:
    """Print every result; 0 only if all checks passed."""
    description = (doctor.__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m largebatch.doctor", description=description)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what training will use; auto: GPUs where there are any",
    )
    parser.add_argument("--limit-s", type=float, default=120, help="time limit of each check, in seconds")
    options = parser.parse_args(arguments)
    failed = 0
    for result in examine(device=options.device, limit_s=options.limit_s):
        failed += not result.ok
        print(result, flush=True)
    some_failed = f"{failed} check{'s' if failed > 1 else ''} failed"
    print(some_failed if failed else "all checks passed: ready to train")
    return 0 if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
