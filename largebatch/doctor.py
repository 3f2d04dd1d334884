"""Tell whether this installation can train: one cause and one command to fix it for each check that fails.

    python -m largebatch.doctor [--device auto|cpu|cuda] [--limit-s 120]

Most Horovod installations that fail do so late and oddly: an undefined symbol after torch was upgraded, an
MPI of the cluster loaded in place of the one that Horovod was built with, each process believing that it is
alone. So the checks go from what is cheap to look at up to what counts: two real processes, under each
launcher, that must reduce a tensor to the exact sum. The exit code is 0 only if every check passes.

Why everything that touches Horovod or MPI runs in a child process: a wrong library does not raise, it kills
the process, and what broke in one check must not decide the next. For the same reason nothing of ours is
imported.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

INSTALL = "mpi_scripts/install.sh"
REINSTALL = "mpi_scripts/install.sh --force"

MODULES = (
    "torch",
    "numpy",
    "PIL",
    "nvidia.dali",
    "mpi4py",
    "zoo",
    "jsonargparse",
    "rich",
    "tensorboard",
    "matplotlib",
    "sklearn",
    "safetensors",
    "yaml",
)

# Run in a child: the last name printed is the culprit when it fails.
IMPORT_EACH = """
import importlib, sys
for module in sys.argv[1:]:
    print(module, flush=True)
    importlib.import_module(module)
"""

# Run in a child: what Horovod was built for and with, and which MPI library came with it.
HOROVOD_FACTS = """
import ctypes, json, pathlib, re
import horovod, horovod.torch as hvd
import torch
metadata = pathlib.Path(horovod.__file__).with_name("metadata.json")
facts = {
    "version": horovod.__version__,
    "built_for": json.loads(metadata.read_text()).get("pytorch") if metadata.exists() else None,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": torch.cuda.device_count(),
    "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()),
    "libmpi": None, "mpi_version": None,
}
libraries = re.findall(r"(/\\S*/libmpi\\.so\\S*)", pathlib.Path("/proc/self/maps").read_text())
if libraries:
    text = ctypes.create_string_buffer(8192)
    ctypes.CDLL(libraries[0]).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    facts.update(libmpi=libraries[0], mpi_version=text.value.decode(errors="replace"))
print("facts " + json.dumps(facts))
"""

# Run by each of the two ranks. Integers in float64: the sum is exact whatever the order of adding.
ALLREDUCE = """
import sys
import torch
import horovod.torch as hvd
hvd.init()
device = torch.device(sys.argv[1], hvd.local_rank()) if sys.argv[1] == "cuda" else torch.device("cpu")
mine = torch.arange(1000, dtype=torch.float64, device=device) + 1000 * hvd.rank()
total = hvd.allreduce(mine, op=hvd.Sum, name="largebatch.doctor").sum().item()
print(f"rank={hvd.rank()} size={hvd.size()} total={total:.0f}.", flush=True)
hvd.shutdown()
"""
RANKS = 2
EXPECTED_TOTAL = sum(value + 1000 * rank for rank in range(RANKS) for value in range(1000))


@dataclass(frozen=True)
class Result:
    """Outcome of one check. `detail` says what was found, `cause` and `fix` are empty when it passed."""

    name: str
    ok: bool
    detail: str = ""
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Output:
    """What a child process left. `code` is negative for a signal and None when it ran out of time."""

    code: int | None
    stdout: str
    stderr: str

    @property
    def last_error(self) -> str:
        """The last line with a word in it: of what was said on stderr, if anything was."""
        for text in (self.stderr, self.stdout):
            lines = [line.strip() for line in text.splitlines() if line.strip(" -*")]
            if lines:
                return lines[-1][:300]
        return "no message"

    @property
    def how_it_ended(self) -> str:
        signum = -self.code if self.code is not None and self.code < 0 else (self.code or 0) - 128
        if 0 < signum < signal.NSIG:
            return f"was killed by {signal.Signals(signum).name}"
        return f"ended with exit code {self.code}"


def run(command: list[str], *, limit_s: float) -> Output:
    """Run a command in its own process group, which is killed as a whole when the time is up."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            return Output(None, stdout, stderr)
    return Output(process.returncode, stdout, stderr)


# ---- single process ------------------------------------------------------------------------------


def pinned() -> Iterator[Requirement]:
    """The requirements of this project as installed, optional ones left out."""
    for text in importlib.metadata.requires("largebatch") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def check_versions() -> Result:
    """Every pinned package is installed in the pinned version."""
    name = "package versions"
    try:
        requirements = list(pinned())
    except importlib.metadata.PackageNotFoundError:
        return Result(name, False, cause=f"this project is not installed for {sys.executable}", fix=INSTALL)
    for requirement in requirements:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return Result(name, False, cause=f"{requirement} is not installed", fix=INSTALL)
        if not requirement.specifier.contains(version, prereleases=True):
            cause = f"{requirement} is needed, {version} is installed"
            return Result(name, False, cause=cause, fix=f"{sys.executable} -m pip install '{requirement}'")
    return Result(name, True, f"{len(requirements)} packages as pinned")


def check_imports(modules: tuple[str, ...] = MODULES, *, limit_s: float = 120) -> Result:
    """Every package imports, each after the other in one child."""
    name = "package imports"
    output = run([sys.executable, "-c", IMPORT_EACH, *modules], limit_s=limit_s)
    if output.code == 0:
        return Result(name, True, f"{len(modules)} packages import")
    culprit = (output.stdout.split() or ["the first package"])[-1]
    return Result(name, False, cause=f"importing {culprit} failed: {output.last_error}", fix=REINSTALL)


def horovod_facts(*, limit_s: float = 120) -> tuple[dict, Output]:
    """What HOROVOD_FACTS prints, or an empty dict, and the child's output."""
    output = run([sys.executable, "-c", HOROVOD_FACTS], limit_s=limit_s)
    line = next((line for line in output.stdout.splitlines() if line.startswith("facts ")), "facts {}")
    return json.loads(line.removeprefix("facts ")), output


def check_horovod(facts: dict, output: Output) -> Result:
    """Horovod and its compiled part load. Also the C++ ABI: with the wrong one symbols are missing."""
    name, error = "Horovod imports", output.stderr
    if facts:
        return Result(name, True, f"Horovod {facts['version']}")
    if re.search(r"No module named 'horovod'", error):
        return Result(name, False, cause=f"Horovod is not installed for {sys.executable}", fix=INSTALL)
    symbol = re.search(r"undefined symbol: (\w+)", error)
    if symbol:
        cause = (
            f"Horovod was compiled for another torch than the one installed (undefined symbol {symbol[1]})"
        )
        return Result(name, False, cause=cause, fix=REINSTALL)
    library = re.search(r"(lib\S+): cannot open shared object file", error)
    if library:
        cause = f"{library[1]}, which Horovod was linked with, is not found"
        return Result(name, False, cause=cause, fix=REINSTALL)
    if re.search(r"Extension .* has not been built", error):
        return Result(name, False, cause="Horovod was installed without its torch extension", fix=REINSTALL)
    if output.code is None:
        return Result(name, False, cause="importing Horovod did not end in time", fix=REINSTALL)
    cause = f"importing Horovod {output.how_it_ended}: {output.last_error}"
    return Result(name, False, cause=cause, fix=REINSTALL)


def check_built_for(facts: dict) -> Result:
    """Horovod was compiled against this very torch: a near version may load and still be wrong."""
    name = "Horovod's torch"
    if facts["built_for"] == facts["torch"]:
        return Result(name, True, f"built for torch {facts['torch']}")
    built_for = facts["built_for"] or "an unknown version"
    cause = f"Horovod was built for torch {built_for}, torch {facts['torch']} is installed"
    return Result(name, False, cause=cause, fix=REINSTALL)


def check_controllers(facts: dict) -> Result:
    """horovodrun and mpirun need MPI, horovodrun --gloo needs Gloo."""
    name = "MPI and Gloo"
    missing = [label for label, key in (("MPI", "mpi"), ("Gloo", "gloo")) if not facts[key]]
    if missing:
        cause = f"Horovod was built without {' and '.join(missing)}"
        return Result(name, False, cause=cause, fix=REINSTALL)
    return Result(name, True, "both built")


def mpi_number(text: str) -> str:
    """The first thing in the text that looks like a version: "Open MPI v4.1.8, package: ..." gives 4.1.8."""
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else "of unknown version"


def check_launchers(facts: dict, *, limit_s: float = 60) -> Result:
    """mpirun and horovodrun are found, are this installation's, and start the MPI that Horovod loads."""
    name, activate = "launchers", f". {shlex.quote(str(Path(sys.prefix, 'bin', 'activate')))}"
    horovodrun, mpirun = shutil.which("horovodrun"), shutil.which("mpirun")
    if horovodrun is None or mpirun is None:
        missing = "mpirun" if horovodrun else "horovodrun"
        return Result(name, False, cause=f"{missing} is not on PATH", fix=activate)
    if Path(horovodrun).parent.resolve() != Path(sys.executable).parent.resolve():
        cause = f"horovodrun on PATH is {horovodrun}, which belongs to another Python than {sys.executable}"
        return Result(name, False, cause=cause, fix=activate)
    output = run([mpirun, "--version"], limit_s=limit_s)
    if output.code != 0:
        cause = f"{mpirun} --version {output.how_it_ended}: {output.last_error}"
        return Result(name, False, cause=cause, fix=REINSTALL)
    started, loaded = mpi_number(output.stdout + output.stderr), mpi_number(facts["mpi_version"] or "")
    if started != loaded:
        cause = (
            f"{mpirun} starts MPI {started}, but Horovod loads {facts['libmpi']}, MPI {loaded}: "
            "every process would believe that it is alone"
        )
        return Result(name, False, cause=cause, fix=activate)
    return Result(name, True, f"MPI {started}, {mpirun}")


def check_hostname() -> Result:
    """Gloo resolves this machine's own name, and crashes without a message when it cannot."""
    name, host = "host name", socket.gethostname()
    try:
        return Result(name, True, f"{host} is {socket.gethostbyname(host)}")
    except OSError:
        fix = f"echo '127.0.0.1 {host}' | sudo tee -a /etc/hosts"
        return Result(name, False, cause=f"the name of this machine, {host}, does not resolve", fix=fix)


def visible_gpus(*, limit_s: float = 60) -> int:
    """Number of GPUs that the driver shows, torch not asked: torch without CUDA sees none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    return sum(line.startswith("GPU ") for line in run([tool, "-L"], limit_s=limit_s).stdout.splitlines())


def check_gpu(facts: dict, device: str) -> Result:
    """On a machine with GPUs, torch sees them and Horovod reduces them with NCCL."""
    name, gpus = "GPU and NCCL", visible_gpus()
    if device == "cpu":
        return Result(name, True, "not looked at (--device cpu)")
    if gpus == 0:
        if device == "cuda":
            return Result(
                name, False, cause="--device cuda was given, but no GPU is visible", fix="nvidia-smi -L"
            )
        return Result(name, True, "no GPU is visible, training uses the CPU")
    if facts["cuda"] is None:
        cause = (
            f"{gpus} GPUs are visible, but torch {facts['torch']} was built without CUDA "
            "(pip's own settings may point to a CPU build)"
        )
        return Result(name, False, cause=cause, fix=f"PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= {REINSTALL}")
    if facts["gpus"] == 0:
        cause = (
            f"{gpus} GPUs are visible, but torch (CUDA {facts['cuda']}) sees none: the driver may be too old"
        )
        return Result(name, False, cause=cause, fix="nvidia-smi")
    if not facts["nccl"]:
        cause = f"{gpus} GPUs are visible, but Horovod was built without NCCL"
        return Result(name, False, cause=cause, fix=f"CUDA_HOME=/usr/local/cuda OPERATIONS=nccl {REINSTALL}")
    return Result(name, True, f"{facts['gpus']} GPUs, CUDA {facts['cuda']}, NCCL")


# ---- two processes -------------------------------------------------------------------------------

LAUNCHES: dict[str, list[str]] = {
    "horovodrun": ["horovodrun", "-np", str(RANKS)],
    "mpirun": ["mpirun", "-np", str(RANKS)],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np", str(RANKS)],
}


def check_allreduce(launch: str, *, device: str = "cpu", limit_s: float = 120) -> Result:
    """Two real processes reduce a tensor, and both must print the exact sum."""
    name = f"{RANKS}-process allreduce, {launch}"
    command = [*LAUNCHES[launch], sys.executable, "-c", ALLREDUCE, device]
    by_hand = shlex.join([*LAUNCHES[launch], sys.executable, "-c", "import horovod.torch as hvd; hvd.init()"])
    output = run(command, limit_s=limit_s)
    if output.code is None:
        return Result(
            name, False, cause=f"no answer within {limit_s:g} s", fix=f"HOROVOD_LOG_LEVEL=debug {by_hand}"
        )
    answers = re.findall(r"rank=(\d+) size=(\d+) total=(\d+)\.", output.stdout)
    sizes, totals = {int(size) for _, size, _ in answers}, {int(total) for _, _, total in answers}
    if sizes == {1}:
        cause = (
            f"{RANKS} processes were started, but each sees a size of 1: it is not its MPI that started them"
        )
        return Result(name, False, cause=cause, fix=REINSTALL)
    if output.code != 0:
        cause = f"{launch} {output.how_it_ended}: {output.last_error}"
        return Result(name, False, cause=cause, fix=by_hand)
    if {int(rank) for rank, _, _ in answers} != set(range(RANKS)):
        return Result(name, False, cause=f"{len(answers)} of {RANKS} processes answered", fix=by_hand)
    if totals != {EXPECTED_TOTAL}:
        cause = f"the sum should be {EXPECTED_TOTAL}, it is {', '.join(map(str, sorted(totals)))}"
        return Result(name, False, cause=cause, fix=REINSTALL)
    return Result(name, True, f"the sum is exactly {EXPECTED_TOTAL} on {device}")


def device_for_launches(facts: dict, device: str) -> str:
    """cuda where both ranks can have a GPU of their own, as NCCL asks for; otherwise cpu."""
    return "cuda" if device != "cpu" and facts["nccl"] and facts["gpus"] >= RANKS else "cpu"


def examine(*, device: str = "auto", limit_s: float = 120) -> Iterator[Result]:
    """All results in order; launches are left out when what they need has already failed."""
    facts, output = horovod_facts(limit_s=limit_s)
    checks: list[Callable[[], Result]] = [check_versions, check_imports, lambda: check_horovod(facts, output)]
    if facts:
        checks += [
            lambda: check_built_for(facts),
            lambda: check_controllers(facts),
            lambda: check_launchers(facts),
            check_hostname,
            lambda: check_gpu(facts, device),
        ]
    all_ok = True
    for check in checks:
        result = check()
        all_ok &= result.ok
        yield result
    if not facts:
        return
    if not all_ok:
        yield Result(
            "2-process allreduce", False, cause="not tried, as a check above failed", fix="the fix above"
        )
        return
    for launch in LAUNCHES:
        yield check_allreduce(launch, device=device_for_launches(facts, device), limit_s=limit_s)


def describe(result: Result) -> str:
    """One line, or three for a failure."""
    if result.ok:
        return f"ok    {result.name}: {result.detail}"
    return f"FAIL  {result.name}\n      cause: {result.cause}\n      fix:   {result.fix}"


def main(arguments: list[str] | None = None) -> int:
    """Print every result; 0 only if all checks passed."""
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.doctor", description=(__doc__ or "").split("\n")[0]
    )
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
        print(describe(result), flush=True)
    print("all checks passed: ready to train" if failed == 0 else f"{failed} checks failed")
    return 0 if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
