"""Let torchvision be imported beside a torch build that its compiled library does not match.

timm imports torchvision, and torchvision registers shape functions for its operators `nms` and `qnms` while
it is imported. The Python registry's torchvision is built for CUDA: beside the CPU build of torch its
library cannot be loaded, the two operators do not exist, and the import fails. Declared beforehand, without
an implementation, they let everything else work; calling them would fail, and nothing here calls them.

To find out if this is needed, load the library as torchvision itself does; if that succeeds, declare nothing.
"""

import importlib.machinery
import importlib.util
import logging

import torch

logger = logging.getLogger(__name__)

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators() -> tuple[str, ...]:
    """Declare the operators that torchvision will need and not find; return their names."""
    package = importlib.util.find_spec("torchvision")  # finds it without importing it
    if package is None or _library_loads(list(package.submodule_search_locations or ())):
        return ()
    missing = tuple(name for name in OPERATORS if not hasattr(torch.ops.torchvision, name))
    for name in missing:
        torch.library.define(f"torchvision::{name}", SCHEMA)
    logger.debug("torchvision's compiled operators do not load; declared %s without implementation", missing)
    return missing


def _library_loads(folders: list[str]) -> bool:
    """Load torchvision's compiled operators, as its own import does a moment later."""
    library = importlib.machinery.PathFinder.find_spec("_C", folders)
    if library is None or library.origin is None:
        return False
    try:
        torch.ops.load_library(library.origin)
    except (ImportError, OSError):
        return False
    return True


declare_missing_operators()
