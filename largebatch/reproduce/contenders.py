"""The optimizers that are compared: their options of `largebatch.train`, and where to search.

`rate` is the middle of the grid of learning rates, for all batches. Only the learning rate is searched; momentum, decay
rates of the moments and weight decay are the usual ones. Warm-up, decay and clipping are the same for all.
Look-LayerSAM is our variant; short runs chose its options (docs/optimizers.md), which the others did not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contender:
    label: str
    rate: float
    options: Mapping[str, Any]


LAMB = {"optim.name": "lamb", "optim.weight_decay": 0.01}
CONTENDERS = {
    "sgd": Contender("SGD", 0.25, {"optim.name": "sgd", "optim.weight_decay": 1e-4}),
    "adamw": Contender("AdamW", 4e-3, {"optim.name": "adamw", "optim.weight_decay": 0.05}),
    "lars": Contender("LARS", 8.0, {"optim.name": "lars", "optim.weight_decay": 1e-4}),
    "lamb": Contender("LAMB", 4e-2, LAMB),
    "lamb_look_sam": Contender("LAMB with our Look-LayerSAM", 4e-2, LAMB | {"optim.sam_rho": 0.005}),
    "muon": Contender("Muon", 4e-3, {"optim.name": "muon", "optim.weight_decay": 0.05}),
}
