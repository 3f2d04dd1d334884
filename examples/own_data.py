"""A Dataset of your own, loaded by worker processes, in an order that ranks, workers and a resume do not change.

    horovodrun -np 2 python examples/own_data.py runs/own_data
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

import largebatch
import zoo


class Digits(Dataset[dict[str, Tensor]]):
    """Scikit-learn's digits. A sample may be anything that torch's DataLoader, or your collate_fn, collates."""

    def __init__(self) -> None:
        self.digits = load_digits()

    def __len__(self) -> int:
        return len(self.digits.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = torch.tensor(self.digits.images[index], dtype=torch.float32)[None, None] / 8 - 1
        image = F.interpolate(image, size=(32, 32)).expand(1, 3, -1, -1)[0]
        return {"image": image, "label": torch.tensor(self.digits.target[index])}


with largebatch.session() as comm:
    torch.manual_seed(0)
    device = comm.device()
    model = zoo.create_model("vit_nano32", img_size=32, num_classes=10).to(device)
    steps = largebatch.Steps(comm, Digits(), global_batch_size=96, micro_batch_size=24, epochs=2, num_workers=2)
    optimizer = comm.wrap(largebatch.Lamb.paper(model, lr=1e-2), model, passes=steps.passes)
    steps.checkpoint(sys.argv[1], model, optimizer, every=5)
    for micro_batches in steps:
        for batch, weight in micro_batches:
            logits = model(batch["image"].to(device))
            (weight * F.cross_entropy(logits, batch["label"].to(device))).backward()
        optimizer.step()
        optimizer.zero_grad()
