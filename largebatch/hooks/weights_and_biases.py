"""The numbers of a run at Weights & Biases, with --log.to wandb. WANDB_MODE=offline keeps them in the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largebatch.engine import Trainer
from largebatch.files.run_folder import Row
from largebatch.hooks.sinks import Tracker
from largebatch.report.history import identity

PROJECT = "largebatch"  # unless WANDB_PROJECT is set


class WeightsAndBiases(Tracker):
    """Sends the rows by their step. A resumed run goes on with the same entry."""

    def __init__(self, folder: str | Path, options: Mapping[str, Any]) -> None:
        self.folder, self.options = Path(folder), dict(options)

    def open(self, trainer: Trainer) -> None:
        """Raises ValueError if wandb is missing, or does not start."""
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--log.to has wandb, which is not installed ({error}): run `python -m pip install wandb`, or "
                "leave the option out."
            ) from error
        place = self.folder.resolve()
        try:
            self.run = wandb.init(
                project=wandb.Settings().project or PROJECT,
                name=place.name,
                id=identity(place),
                resume="allow",
                dir=str(place),
                config=self.options,
                settings=wandb.Settings(silent=True, console="off"),  # our lines alone are printed
            )
        except wandb.Error as error:
            raise ValueError(
                f"--log.to has wandb, which does not start ({error}): run `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from error
        # A resumed run writes some steps again; wandb's own counter would refuse them.
        self.run.define_metric("*", step_metric="step")

    def close(self) -> None:
        self.run.finish()

    def add(self, numbers: Mapping[str, float], row: Row) -> None:
        self.run.log({**numbers, "step": int(row["step"]), "epoch": row["epoch"]})
