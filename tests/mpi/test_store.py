"""An image folder is packed, copied into an S3 server, trained on from there by two ranks, and the run resumes."""

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import s3
from launch import ENVIRONMENT, LAUNCHERS, ROOT, launch, run, started, wait_for
from runs import SMALL, different, weights
from store import KEY, SECRET, open_store
from test_packing import BATCH, COMMAND, OPTIONS, digits, packed  # noqa: F401  # fixtures

PAGE = (ROOT / "docs" / "imagenet.md").read_text()
RUN = [*SMALL, *BATCH, "--recipe", "quickstart", "--run.duration", "4 steps", "--run.eval_every", "2 steps"]


@pytest.fixture(scope="module")
def store():
    with open_store() as opened:
        yield opened


def train(folder: Path, data: str, environment: dict[str, str], *options: str) -> tuple[int, str]:
    arguments = ["-m", "largebatch.train", *RUN, "--data", data, "--run.folder", str(folder), *options]
    return launch(arguments, ranks=2, environment=environment, timeout_s=150)


def test_the_commands_of_the_page(tmp_path, store, digits):  # noqa: F811
    """As they stand there, but for a small model, two steps, the copy and the installation."""
    (block,) = re.findall(r"## 4. Images in an object store\n.*?```sh\n(.*?)```", PAGE, re.DOTALL)
    packing, copying, installing, training = block.strip().split("\n")
    places = {"IMAGE_FOLDER": str(digits), "SHARDS": str(tmp_path / "shards"), "BUCKET": "bucket"}
    packing, training = (re.sub("|".join(places), lambda found: places[found[0]], line) for line in (packing, training))
    assert copying == "aws s3 cp --recursive SHARDS s3://BUCKET/imagenet" and "'largebatch[remote]'" in installing
    environment = store.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code, output = run(shlex.split(packing), environment=environment)
    assert code == 0, output
    store.put(tmp_path / "shards", "bucket/imagenet")
    for steps, said in ((1, "96 training images of 10 classes"), (2, "resumed at step 1")):
        short = [*SMALL, *BATCH, "--run.folder", str(tmp_path / "run"), "--run.max_steps", str(steps)]
        code, output = run([*shlex.split(training), *short], environment=environment)
        assert code == 0 and said in output, output
    shards = [*(tmp_path / "cache" / "largebatch" / "remote" / "s3" / "bucket" / "imagenet").glob("train-*")]
    assert shards and {path.stat().st_mode & 0o777 for path in shards} == {0o400}  # whole


def test_a_run_from_a_store_has_the_weights_of_one_from_a_disk_and_resumes(tmp_path, store, packed):  # noqa: F811
    """With room for about half of the shards; resumed with another cache, and the store fails now and then."""
    address = store.put(packed, "bucket/digits")
    environment = store.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    half = sum(path.stat().st_size for path in packed.glob("train-*")) // 2
    code, output = train(tmp_path / "local", str(packed), environment)
    assert code == 0, output
    store.fault = lambda number, request: ("", "", "", "reset", "", "503")[number % 6] if "bytes=" in request else ""
    code, output = train(tmp_path / "run", address, environment, "--data.cache", f"{half}", "--run.max_steps", "2")
    assert code == 0 and "of them" not in output and "at s3://bucket/digits stay there" in output, output
    code, output = train(tmp_path / "run", address, environment, "--data.cache", "0")
    assert code == 0 and "resumed at step 2" in output, output
    assert different(weights(tmp_path / "run"), weights(tmp_path / "local")) == []
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(kept) > 5 and not [path for path in kept if SECRET.encode() in path.read_bytes()]
    assert not [path for path in kept if KEY.encode() in path.read_bytes()] and SECRET not in output


def test_an_empty_machine_goes_on_with_the_same_command(tmp_path, packed):  # noqa: F811
    """Two ranks train from a store and copy their checkpoints into it. They are killed, and all folders are lost."""
    long = ["--run.duration", "60 steps", "--run.eval_every", "60 steps"]
    code, output = train(tmp_path / "whole", str(packed), {"XDG_CACHE_HOME": str(tmp_path / "other cache")}, *long)
    assert code == 0, output
    with s3.server(tmp_path / "log", "bucket") as port:
        for shard in packed.iterdir():
            s3.client(port).upload_file(str(shard), "bucket", f"digits/{shard.name}")
        machine = tmp_path / "machine"
        environment = s3.environment(port) | {"XDG_CACHE_HOME": str(machine / "cache")}
        mirrored = ["--checkpoint.every", "1 step", "--checkpoint.mirror", "s3://bucket/runs"]
        command = ["-m", "largebatch.train", *RUN, *long, "--data", "s3://bucket/digits", *mirrored]
        command += ["--run.folder", str(machine / "run")]
        launcher = [*LAUNCHERS["mpirun"](2), "python"]
        with started([*launcher, *command], tmp_path / "output", environment=environment | ENVIRONMENT) as process:
            there = re.compile(r"runs/run/checkpoints/\d+/manifest\.json")
            wait_for(lambda: any(map(there.fullmatch, s3.keys(port))), tmp_path / "output")
            said = (tmp_path / "output").read_text()
            pids = [process.pid, *map(int, re.findall(r"\(pid (\d+)\)", said))]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            process.wait()
            wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), tmp_path / "output")
        assert len(pids) == 3 and "step 60/60" not in said
        shutil.rmtree(machine)
        code, output = launch(command, ranks=2, environment=environment, timeout_s=150)
        assert code == 0 and "was fetched from the mirror" in output and "resumed at step" in output, output
    assert different(weights(machine / "run"), weights(tmp_path / "whole")) == []
    assert (machine / "run" / "steps.csv").read_text().count("\n") == 61  # also the steps of the lost machine


def test_credentials_that_expire_end_both_ranks_with_one_sentence(tmp_path, store, packed):  # noqa: F811
    """Then the same command goes on."""
    address = store.put(packed, "bucket/digits")
    environment = store.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    begun = len(store.asked)

    def fault(number: int, request: str) -> str:
        """From the time on at which the images are read one by one."""
        single = "bytes=" in request and number > begun + 60
        return "expired" if single else ""

    store.fault = fault
    code, output = train(tmp_path / "run", address, environment, "--data.cache", "0")
    assert code != 0 and "Traceback" not in output, output
    assert f"{address}/" in output and "may not be read (The provided token has expired): renew or set" in output
    store.fault = lambda number, request: ""
    code, output = train(tmp_path / "run", address, environment)
    assert code == 0, output


def test_an_address_that_is_not_there_ends_both_ranks_with_one_sentence(tmp_path, store):
    environment = store.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code, output = train(tmp_path / "run", "s3://nobucket/x", environment)
    assert code != 0 and output.count("s3://nobucket/x is not there: check the address") == 1, output
    assert "Traceback" not in output and not (tmp_path / "run" / "checkpoints").exists()
