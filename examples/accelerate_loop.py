"""Our LAMB and a model of the zoo in a loop with Hugging Face's accelerate.

    python examples/accelerate_loop.py

`accelerate launch` starts it on several GPUs.
"""

import digits
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

import zoo
from largebatch import Lamb

EPOCHS, BATCH, PASSES = 3, 48, 2

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=PASSES)
train, held_out = digits.load()
model = zoo.create_model("vit_nano32", img_size=64, num_classes=10)
# The optimizer belongs to the model, so it is made before `prepare` wraps the model.
optimizer = Lamb.paper(model, lr=4e-2)
batch_size = BATCH // PASSES // accelerator.num_processes
loader = DataLoader(train, batch_size=batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(EPOCHS):
    for images, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(images), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: {digits.top1(accelerator.unwrap_model(model), held_out)}")
