"""The optimizers that are compared, as data: the options of `largebatch.train` that make each, and where to search.

`rate` is the middle of the grid of learning rates, for all batches alike. Momentum, decay rates of the moments and
weight decay are the usual ones of each optimizer; the learning rate alone is searched. All have the same warm-up, decay
and clipping.

Look-LayerSAM has this package's defaults, which short runs chose (docs/optimizers.md); the others had no such runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contender:
    """An optimizer with its options. cost: the time of its step, relative to the others', for the estimate."""

    label: str
    rate: float
    options: Mapping[str, Any]
    cost: float = 1.0


LAMB = {"optim.name": "lamb", "optim.weight_decay": 0.01}
CONTENDERS = {
    "sgd": Contender("SGD", 0.25, {"optim.name": "sgd", "optim.weight_decay": 1e-4}),
    "adamw": Contender("AdamW", 4e-3, {"optim.name": "adamw", "optim.weight_decay": 0.05}),
    "lars": Contender("LARS", 8.0, {"optim.name": "lars", "optim.weight_decay": 1e-4}),
    "lamb": Contender("LAMB", 4e-2, LAMB),
    "lamb_look_sam": Contender("LAMB with Look-LayerSAM", 4e-2, LAMB | {"optim.sam_rho": 0.005}, cost=1.3),
    "muon": Contender("Muon", 4e-3, {"optim.name": "muon", "optim.weight_decay": 0.05}, cost=1.2),
}
