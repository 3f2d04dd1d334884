"""A model as a graph that other programs run: ONNX, and torch.export. The batch may have any size.

Before a file appears, its graph is run on other numbers of images than it was made with, and its logits are compared
with the model's.
"""

import contextlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import hub

ONNX_TOLERANCE = 1e-4  # of the largest logit; onnxruntime adds up in another order
TRACED, CHECKED = 2, (1, 3)  # images


def write_torch(model: nn.Module, name: str, path: Path) -> str:
    """Write the model for `torch.export.load`, with exactly its logits; return a sentence about it."""
    program = _trace(model)

    save = partial(torch.export.save, program, extra_files={hub.CONFIG: _description(model, name)})
    return _write("torch.export", model, path, save, lambda file: torch.export.load(file).module(), tolerance=0.0)


def write_onnx(model: nn.Module, name: str, path: Path) -> str:
    """Write the model as ONNX; return a sentence about it. ValueError if a package is not installed."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as missing:
        remedy = "pip install onnx onnxscript onnxruntime (setup.cfg has their versions, as the extra onnx)"
        raise ValueError(f"ONNX needs {missing.name}, which is not installed: {remedy}.") from None
    with _quiet():
        names: Any = {"input_names": ["images"], "output_names": ["logits"]}
        program: Any = torch.onnx.export(_trace(model), (), dynamo=True, verbose=False, **names)
    program.model.metadata_props[hub.CONFIG] = _description(model, name)

    def load(file: Path) -> Callable[[Tensor], Tensor]:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    return _write("ONNX", model, path, lambda file: program.save(str(file)), load, tolerance=ONNX_TOLERANCE)


def _trace(model: nn.Module) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        return torch.export.export(model, (_images(model, TRACED),), dynamic_shapes=({0: batch},))


Graph = Callable[[Tensor], Tensor]
Save = Callable[[Path], None]
Load = Callable[[Path], Graph]


def _write(kind: str, model: nn.Module, path: Path, save: Save, load: Load, *, tolerance: float) -> str:
    """Save aside, compare, move; return a sentence. A large ONNX model has a second file, for its weights."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
        file = Path(aside, path.name)
        save(file)
        worst = _compare(model, load(file))
        if not worst <= tolerance:
            raise ValueError(f"The logits of {path} would differ from the model's by {worst:.1g}: it is not written.")
        names = sorted(os.listdir(aside), reverse=True)
        for name in names:  # the model comes last
            os.replace(Path(aside, name), path.with_name(name))
    files = " with ".join([str(path), *names[:-1]])
    difference = f"largest difference to the model {worst:.1g} of the largest logit"
    return f"{files}: {kind}, images {_shape(model)} -> logits; {difference}"


@torch.no_grad()
def _compare(model: nn.Module, graph: Graph) -> float:
    """Return the largest difference as a share of the largest logit."""
    worst = 0.0
    for count in CHECKED:
        images = _images(model, count)
        expected = model(images)
        worst = max(worst, float((graph(images) - expected).abs().max() / expected.abs().max()))
    return worst


def _images(model: nn.Module, count: int) -> Tensor:
    shape = getattr(model, "default_cfg")["input_size"]
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def _shape(model: nn.Module) -> str:
    return "(batch, {}, {}, {})".format(*getattr(model, "default_cfg")["input_size"])


def _description(model: nn.Module, name: str) -> str:
    names = getattr(model, "default_cfg").get("label_names", ())
    return json.dumps(hub.describe(name, model, label_names=names))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter: its progress, and warnings of its libraries, which a user cannot change."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
