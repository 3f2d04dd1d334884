"""The commands of the pages in docs/: each is run here, on a small model and shortened, or has a test of its own."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import warm
from launch import ROOT, run

COMMANDS = [
    (page.name, re.sub(r"\s+", " ", command.split(" # ")[0]).strip())
    for page in sorted((ROOT / "docs").glob("*.md"))
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    for command in block.replace("\\\n", "").splitlines()
]
HERE = ("batch-and-rate.md", "on-gpus.md", "optimizers.md", "planner.md")  # the pages whose commands run here
SMALL = "--model vit_nano32 --data.global_batch_size 16 --data.micro_batch_size 1"
SHORTER = {  # by the program of a command; an option that is given twice has its last value
    "largebatch.train": f"{SMALL} --run.max_steps 1 --log.to none --run.folder TMP/run",
    "train_local.sh": f"{SMALL} --run.max_steps 1 --log.to none --run.folder TMP/run",
    "largebatch.find_lr": f"{SMALL} --img-size 32 --run.folder TMP/rate",
    "largebatch.find_batch": "--images 1600",
}
OTHERS = {  # in place of what a reader has
    "TFRECORD_FOLDER": "TMP/images",
    "FOLDER": "TMP/images",
    "runs/vit_b16": "TMP/found",
    "00001000": "00000004",
    "1024@0,4096@10": "4@0,8@10",
    "32768": "16",
}
ELSEWHERE = {  # the file of the test, and its words for the command
    "python -m largebatch.reproduce digits": ("test_reproduce.py", '"reproduce", "digits", "--quick"'),
    "python -m largebatch.reproduce fashion": ("test_fashion.py", "reproduce(study, tmp_path, "),
    "python -m largebatch.reproduce fashion --minutes 60": ("test_fashion.py", "processes=processes, minutes="),
    "python -m largebatch.reproduce fashion --quick": ("test_fashion.py", '"reproduce", "fashion", "--quick"'),
    "OPERATIONS=nccl ./mpi_scripts/install.sh": ("test_cuda_build.py", '"OPERATIONS": "nccl"'),
    "mpi_scripts/pack_imagenet.sh FOLDER_OF_THE_TARS TFRECORD_FOLDER": (
        "mpi/test_scripts_readme.py",
        'succeeds(f"mpi_scripts/pack_imagenet.sh ',
    ),
    "python -m largebatch.pack check TFRECORD_FOLDER": ("mpi/test_packing.py", '[*COMMAND, "check", '),
    "python -m largebatch.doctor --hosts a:8,b:8 --data TFRECORD_FOLDER": (
        "cluster/test_examination.py",
        'examine(hosts, "--data", ',
    ),
    "mpi_scripts/train_multinode.sh -H a:8,b:8 --model vit_b32 --data TFRECORD_FOLDER": (
        "cluster/test_scripts.py",
        'f"mpi_scripts/train_multinode.sh -H h1:1,h2:1 ',
    ),
}
UNTRIED = ("docker ", "kubectl ", "aws ")  # programs that no test machine has; the files that they read have tests


def named(page: str) -> list[str]:
    return [command for name, command in COMMANDS if name == page and command not in ELSEWHERE]


def succeeds(command: str, folder: Path) -> str:
    words = shlex.split(command.replace("TMP", str(folder)))
    code, output = run(words, timeout_s=300, environment={"VENV": str(warm.folder())})
    assert code == 0, output
    return output


def test_each_command_is_tried_or_says_why_not():
    """test_store.py has the block of docs/imagenet.md about object stores whole."""
    block = (ROOT / "docs" / "imagenet.md").read_text().partition("## 4. Images in an object store")[2]
    left = [command for page, command in COMMANDS if page not in HERE and command not in block]
    assert [command for command in left if command not in ELSEWHERE and not command.startswith(UNTRIED)] == []
    assert {*ELSEWHERE} <= {command for _, command in COMMANDS}
    for command, (file, words) in ELSEWHERE.items():
        assert words in (ROOT / "tests" / file).read_text(), command


@pytest.mark.parametrize("page", HERE)
def test_the_commands_of_a_page(page, tmp_path):
    """As they stand there, but for a small model, digits in place of the images, and small batches."""
    (tmp_path / "mine.csv").write_text("batch,epochs\n256,90\n512,90\n1024,100\n")
    succeeds("python -m largebatch.pack digits TMP/images --shards 4", tmp_path)
    if page == "batch-and-rate.md":
        train = f"python -m largebatch.train --data TMP/images {SMALL} --img-size 32 --log.to none"
        succeeds(f"{train} --run.max_steps 4 --run.folder TMP/found", tmp_path)
    for command in named(page):
        shorter = [options for program, options in SHORTER.items() if program in command]
        if page != "planner.md":
            command = re.sub("|".join(map(re.escape, OTHERS)), lambda found: OTHERS[found[0]], command)
        succeeds(" ".join([command.replace("mine.csv", "TMP/mine.csv"), *shorter]), tmp_path)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
