"""Our LAMB in a Horovod program of your own; nothing else of largebatch is used.

    horovodrun -np 2 python examples/own_loop.py
"""

import os

import digits
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

import zoo
from largebatch import Lamb
from largebatch.optim import init_state

EPOCHS, BATCH, PASSES = 3, 48, 2

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))  # the ranks of a host share its cores
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
train, held_out = digits.load()
sampler: DistributedSampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=BATCH // hvd.size() // PASSES, sampler=sampler, drop_last=True)
model = zoo.create_model("vit_nano32", img_size=64, num_classes=10).to(device)

optimizer = hvd.DistributedOptimizer(
    Lamb.paper(model, lr=4e-2),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=PASSES,
)
# Moments of zero on every rank. Without them the broadcast of the state would take a step to create them, with AdamW
# and SGD as well: its gradients are zeros, but weight decay moves the weights.
init_state(optimizer)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

steps = len(loader) // PASSES
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(steps):
        for _ in range(PASSES):
            images, labels = next(batches)
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            (loss / PASSES).backward()
        optimizer.synchronize()
        # Clip the gradients of all ranks together, not those of each: LAMB itself does not clip.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: {digits.top1(model, held_out)}")
hvd.shutdown()
