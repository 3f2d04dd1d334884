"""timm's own train.py with our LAMB as --opt lblamb. The first argument is the path of that program.

    python examples/timm_train.py pytorch-image-models/train.py --data-dir IMAGES --opt lblamb

All other arguments are those of train.py. Write `torchrun --nproc-per-node 4` in place of `python` for four GPUs.
"""

import runpy
import sys
from collections.abc import Iterable
from typing import Any

import zoo  # noqa: F401  before timm, which it makes importable beside torch's CPU build
from largebatch import Lamb

from timm.optim._optim_factory import OptimInfo, default_registry  # isort: skip


def paper_lamb(params: Iterable[Any], **options: Any) -> Lamb:
    """Build LAMB for timm's parameter groups, as --optim.preset paper: tensors without decay are not adapted."""
    params = list(params)
    groups = params if isinstance(params[0], dict) else [{"params": params}]  # without decay timm makes no groups
    return Lamb([{"adapt": group.get("weight_decay") != 0} | group for group in groups], **options)


default_registry.register(OptimInfo(name="lblamb", opt_class=paper_lamb, has_betas=True, description="largebatch's"))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
