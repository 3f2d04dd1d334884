"""Our LAMB and a model of the zoo in the Trainer of Hugging Face's transformers.

    python examples/hf_trainer.py
"""

import zoo  # isort: skip  # first: it lets torchvision, which transformers imports, run beside torch's CPU build

import tempfile
from typing import Any

import digits
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from largebatch import Lamb

EPOCHS, BATCH, PASSES = 3, 48, 2


class Classifier(nn.Module):
    """A model of the zoo in the form that the Trainer expects: named inputs, and the loss among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.create_model("vit_nano32", img_size=64, num_classes=10)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list[Any]) -> dict[str, Tensor]:
    """Return a batch with its names."""
    images, labels = zip(*samples)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


torch.manual_seed(0)
train, held_out = digits.load()
classifier = Classifier()
optimizer = Lamb.paper(classifier, lr=4e-2)
steps = EPOCHS * len(train) // BATCH
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH // PASSES,
        gradient_accumulation_steps=PASSES,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        classifier, arguments, train_dataset=train, data_collator=collate, optimizers=(optimizer, schedule)
    ).train()
print(digits.top1(classifier.model, held_out))
