"""Our LAMB and a model of the zoo in Lightning.

    python examples/lightning_fit.py
"""

import zoo  # isort: skip  # first: it lets torchvision, which Lightning imports, run beside torch's CPU build

import digits
import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from largebatch import Lamb

EPOCHS, BATCH, PASSES = 3, 48, 2


class Classifier(lightning.LightningModule):
    """A model of the zoo with the loss and the optimizer of its training."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.create_model("vit_nano32", img_size=64, num_classes=10)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return LAMB, as --optim.preset paper."""
        return Lamb.paper(self.model, lr=4e-2)


lightning.seed_everything(0)
train, held_out = digits.load()
classifier = Classifier()
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    accumulate_grad_batches=PASSES,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(classifier, DataLoader(train, batch_size=BATCH // PASSES, shuffle=True))
print(digits.top1(classifier.model, held_out))
