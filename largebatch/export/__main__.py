"""Exports a trained model.

    python -m largebatch.export RUN_OR_WEIGHTS FOLDER        # for timm and the Hugging Face hub, with a model card
    python -m largebatch.export RUN_OR_WEIGHTS MODEL.onnx    # ONNX; needs the packages of largebatch[onnx]
    python -m largebatch.export RUN_OR_WEIGHTS MODEL.pt2     # torch.export

RUN_OR_WEIGHTS is a run folder, whose newest checkpoint is taken, a checkpoint, an exported folder, or a file of
weights. A graph takes normalised images (batch, 3, H, W), any number of them, and gives logits, which are compared with
the model's before the file appears. config.json is inside of it.
"""

from collections.abc import Sequence
from pathlib import Path

from largebatch.arguments import Parser, complain, local
from largebatch.export.folder import write_folder
from largebatch.export.graph import write_onnx, write_torch
from largebatch.recipes import user_file
from zoo import create_model, hub

GRAPHS = {".onnx": write_onnx, ".pt2": write_torch}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    args = _parser().parse_args(argv)
    target = Path(args.target)
    try:
        if target.exists() and (target.suffix in GRAPHS or not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} already exists: give the name of a new folder, or of a new file .onnx or .pt2.")
        if args.recipe:
            user_file.run(args.recipe)
        found = hub.read(args.source, average=args.ema)
        model = create_model(weights=found).eval()
        if target.suffix in GRAPHS:
            print(GRAPHS[target.suffix](model, found.name, target))
        else:
            print(write_folder(model, found, target, licence=args.license))
    except (ValueError, OSError) as mistake:
        return complain(mistake)
    return 0


def _parser() -> Parser:
    parser = Parser("export", __doc__)
    parser.add_argument("source", metavar="RUN_OR_WEIGHTS", help="a run, a checkpoint, an exported folder, or a file")
    parser.add_argument("target", type=local, metavar="TARGET", help="a new folder, or a new file .onnx or .pt2")
    parser.add_argument("--recipe", default="", metavar="FILE.py", help="the file that registers a model of your own")
    parser.add_argument("--ema", action="store_true", help="take the average of the weights, if the run kept one")
    licence = "licence of the weights for the model card, as the hub names it, such as apache-2.0 (default: unknown)"
    parser.add_argument("--license", default="unknown", metavar="NAME", help=licence)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
