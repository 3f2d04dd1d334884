"""The data of the examples: scikit-learn's 1,797 handwritten digits, 1,437 to train with and 360 held out."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def load(img_size: int = 64) -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out digits: images (N, 3, img_size, img_size) from -1 to 1, and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(img_size, img_size), mode="bilinear").expand(-1, 3, -1, -1)
    train, held_out = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split([1437, 360])
    labels = torch.tensor(digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


@torch.inference_mode()
def count_right(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return how many images the model classifies rightly, 0-d."""
    model.eval()
    device = next(model.parameters()).device
    return (model(images.to(device)).argmax(1).cpu() == labels).sum()


def top1(model: nn.Module, dataset: TensorDataset) -> str:
    """Return the share of right answers as a text."""
    share = 100 * count_right(model, *dataset.tensors) / len(dataset)
    model.train()
    return f"{share:.1f} % of {len(dataset)} held-out digits"
