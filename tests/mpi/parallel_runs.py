"""Train a small ViT on digits several times in one launch: FOLDER, then names of `RUNS`; see `main`.

All of them put as many ranks to a replica, since Horovod is told of it when it starts.
"""

import sys

from largebatch.ranks import session
from largebatch.ranks.signals import Signals
from largebatch.train import read, run_folder, train

BASE = (
    "--model vit_nano32 --img-size 64 --run.precision fp32 --run.deterministic true "
    "--data.global_batch_size 64 --data.micro_batch_size 32 --data.eval_batch_size 56 --data.num_threads 1 "
    "--log.to none"
).split() + ["--run.duration", "364 images", "--run.eval_every", "3 steps", "--log.every", "1 steps"]
TOKENS = "--model volo_nano --img-size 32 --loss.dense_weight 0.5"
RUNS = {
    "plain": "",
    "volo": TOKENS,
    "volo_1d": f"{TOKENS} --parallel.tensor.size 2",
    "zero": "--parallel.zero 1",
    "offload": "--parallel.zero offload",
    "1d": "--parallel.tensor.size 2",
    "sequence": "--parallel.sequence 2",
    "2d": "--parallel.tensor.mode 2d --parallel.tensor.size 4",
    "pipeline": "--parallel.pipeline 2 --parallel.tensor.size 2 --parallel.micro_batches 4",
    "2.5d": "--parallel.tensor.mode 2.5d --parallel.tensor.size 8 --parallel.tensor.depth 2",
    "3d": "--parallel.tensor.mode 3d --parallel.tensor.size 8",
}


def main(folder: str, *runs: str) -> None:
    """Each run into a folder of its name; NAME/FOLDER=STEPS: into another folder, resumed there, up to that step."""
    argvs = []
    for run in runs:
        place, _, steps = run.partition("=")
        name, _, other = place.partition("/")
        argvs.append([*BASE, *RUNS[name].split(), "--run.folder", f"{folder}/{other or name}"])
        argvs[-1] += ["--run.max_steps", steps or "0"]
    with Signals() as signals, session(read(argvs[0])) as comm:
        for argv in argvs:
            config = read(argv)
            with run_folder(config, comm):
                train(argv, config, comm, signals)


if __name__ == "__main__":
    main(*sys.argv[1:])
