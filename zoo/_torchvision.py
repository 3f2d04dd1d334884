"""Let torchvision be imported beside a torch build that its compiled library does not match.

timm imports torchvision, which registers shape functions for its operators `nms` and `qnms`. The registry's torchvision
is built for CUDA: beside the CPU build of torch the operators do not exist, and the import fails. Declared without an
implementation, they let everything else work, and nothing here calls them. An operator that is registered twice ends
the process, so they are declared when the import has failed, and it is then repeated.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class TorchvisionFinder:
    """Finds torchvision as Python does, and repeats its import if the operators are missing."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec and spec.loader:
            execute = spec.loader.exec_module
            setattr(spec.loader, "exec_module", partial(execute_with_operators, execute))
        return spec


def execute_with_operators(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute torchvision; if it lacks its operators, declare them and execute it again."""
    try:
        execute(module)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        import torch  # not earlier: to look for torchvision is no reason to import it

        for name in OPERATORS:
            torch.library.define(f"torchvision::{name}", SCHEMA)
        execute(module)


sys.meta_path.insert(0, TorchvisionFinder)
