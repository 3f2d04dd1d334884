"""Classify images with the newest weights of a run: torch, timm and the zoo, without Horovod and DALI.

    python examples/inference.py runs/quickstart IMAGE

More images may follow.
"""

import argparse

import torch
from PIL import Image

import zoo

from timm.data import create_transform, resolve_model_data_config  # isort: skip  # after zoo

parser = argparse.ArgumentParser()
parser.add_argument("run", help="the folder of a run")
parser.add_argument("images", nargs="+")
options = parser.parse_args()

model = zoo.create_model(weights=options.run).eval()  # its size and its classes are those of the run
names = model.default_cfg.get("label_names") or [f"class {number}" for number in range(model.num_classes)]
# Resize, crop and normalise as the model wants it; timm's programs do the same.
transform = create_transform(**resolve_model_data_config(model), is_training=False)
for path in options.images:
    image = transform(Image.open(path).convert("RGB"))
    with torch.inference_mode():
        probabilities = model(image[None]).softmax(1)[0]
    best, classes = probabilities.topk(3)
    print(path, ", ".join(f"{names[number]} {100 * share:.1f} %" for share, number in zip(best, classes.tolist())))
