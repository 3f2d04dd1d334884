"""A GPU at work: each thing that a run asks of it, tried once in a child process."""

import re
import resource
import sys
from pathlib import Path

from largebatch.doctor.result import REINSTALL, Result, run
from largebatch.launch.driver import find_driver, oldest_driver
from largebatch.process.installer import install_command

GIB = 2**30
ADAPTERS = Path("/sys/class/infiniband")
NEEDED_LOCKED_BYTES = 2**26  # what NCCL and UCX lock for messages grows with the ranks; some 8 MiB are a usual limit
FILLED = 0.9  # so much of a GPU's memory in the hands of others leaves no room to train

# A child process runs this. If it fails, the last part that it named is the culprit.
PROGRAM = """
import io
def at(part): print("part " + part, flush=True)
at("memory")
import torch
print("memory %d %d" % torch.cuda.mem_get_info(), flush=True)
at("product")
ones = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
assert (ones @ ones).float().mean().item() == 512, "a product is wrong"
at("Triton")
assert torch.compile(torch.sin, fullgraph=True)(ones[0]).isfinite().all(), "compiled code is wrong"
at("DALI")
import numpy
from PIL import Image
from nvidia.dali import Pipeline, fn
jpeg = io.BytesIO()
Image.new("RGB", (64, 48), (200, 100, 50)).save(jpeg, "JPEG")
encoded = numpy.frombuffer(jpeg.getvalue(), numpy.uint8)
pipeline = Pipeline(batch_size=1, num_threads=1, device_id=0)
with pipeline:
    pipeline.set_outputs(fn.decoders.image(fn.external_source(source=lambda: [encoded]), device="mixed"))
pipeline.build()
pixels = pipeline.run()[0].as_cpu().as_array()
assert pixels.shape == (1, 48, 64, 3) and abs(int(pixels[0, 0, 0, 0]) - 200) < 9, "an image is wrong"
at("NCCL")
import importlib.util
totals = list(torch.arange(1.0, 4, device="cuda").split(1))  # several at once go through Horovod's own kernels
if importlib.util.find_spec("horovod"):
    import horovod.torch as hvd
    hvd.init()
    totals = hvd.grouped_allreduce(totals, op=hvd.Sum, name="largebatch.doctor")
else:
    import torch.distributed as dist
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for total in totals:
        dist.all_reduce(total)
assert [total.item() for total in totals] == [1, 2, 3], "a sum is wrong"
at("end")
"""

# The part that fails -> what is wrong, and the command that helps.
FAULTS = {
    "start": ("the trial does not begin", f"{sys.executable} -c 'import torch; print(torch.cuda.mem_get_info())'"),
    "memory": ("the driver does not give a GPU to this process", "nvidia-smi"),
    "product": ("the GPU does not compute", "nvidia-smi -q -d ECC,ROW_REMAPPER; sudo dmesg | grep -i xid"),
    "Triton": ("Triton cannot compile for the GPU", f"sudo apt-get install gcc python3.{sys.version_info[1]}-dev"),
    "DALI": ("DALI cannot decode an image on the GPU", REINSTALL),
    "NCCL": ("NCCL cannot reduce a tensor of the GPU", f"NCCL_DEBUG=INFO {sys.executable} -m largebatch.doctor"),
}


def check_gpu_works(facts: dict, *, limit_s: float, program: str = PROGRAM) -> Result:
    """Check that a GPU multiplies, runs a kernel of Triton, decodes an image with DALI and reduces with NCCL."""
    name = "a GPU works"
    if not (facts["gpus"] and facts["nccl"]):
        return Result(name, True, "no GPU")
    output = run([sys.executable, "-c", program], limit_s=limit_s)
    found = re.search(r"^memory (\d+) (\d+)$", output.stdout, re.MULTILINE)
    free, total = map(int, found.groups()) if found else (0, 0)
    if free < (1 - FILLED) * total:
        cause = f"only {free / GIB:.1f} of {total / GIB:.0f} GiB of the GPU are free: another process fills it"
        return Result(name, False, cause=cause, fix="nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")
    part = (re.findall(r"^part (\w+)$", output.stdout, re.MULTILINE) or ["start"])[-1]
    if output.code == 0 and part == "end":
        return Result(name, True, f"product, Triton, DALI, NCCL; {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    what, fix = FAULTS.get(part, FAULTS["NCCL"])  # after the end, only NCCL and MPI are left
    if output.code is None or output.code < 0:  # the time limit, or a signal, which may have a cause of its own
        what = f"in its part {part}"
    return Result(name, False, cause=f"{what}: the trial {output.how_it_ended}: {output.last_error}", fix=fix)


def check_driver(facts: dict) -> Result:
    name, driver, cuda = "NVIDIA's driver", find_driver(), facts["cuda"]
    if driver is None:
        return Result(name, True, "no driver")
    oldest = oldest_driver(cuda)
    if driver.major >= oldest:
        return Result(name, True, f"{driver.version}, {driver.num_gpus} GPUs")
    cause = f"driver {driver.version} is older than {oldest}, which torch's CUDA {cuda} needs, so torch sees no GPU"
    older = "sudo apt-get install --upgrade nvidia-driver"
    fix = install_command(settings=f"CUDA={driver.cuda}") if driver.cuda else older
    return Result(name, False, cause=cause, fix=fix)


def check_locked_memory() -> Result:
    """Check the memory that a process may lock: InfiniBand and RoCE lock the memory of messages."""
    name, (soft, hard) = "locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not ADAPTERS.is_dir() or not any(ADAPTERS.iterdir()):
        return Result(name, True, "no InfiniBand")
    if soft < 0 or soft >= NEEDED_LOCKED_BYTES:
        return Result(name, True, "unlimited" if soft < 0 else f"{soft // 2**20} MiB")
    cause = f"a process may lock {soft // 1024} KiB, too few for messages over InfiniBand, which NCCL and MPI send"
    raised = hard < 0 or hard >= NEEDED_LOCKED_BYTES
    limits = "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf  # then log in again"
    return Result(name, False, cause=cause, fix="ulimit -l $(ulimit -H -l)" if raised else limits)
