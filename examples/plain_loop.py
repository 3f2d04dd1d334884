"""A training loop in plain PyTorch. session_loop.py is the same on any number of ranks, with seven other lines.

    python examples/plain_loop.py
"""

import digits
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import zoo

EPOCHS, BATCH = 3, 48

torch.manual_seed(0)
train, held_out = digits.load()
order = torch.Generator().manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = zoo.create_model("vit_nano32", img_size=64, num_classes=10).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(EPOCHS):
    for images, labels in DataLoader(train, batch_size=BATCH, shuffle=True, generator=order):
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: {digits.top1(model, held_out)}")
