"""The numbers of a run as event files, RUN/tensorboard, with --log.to tensorboard."""

from collections.abc import Mapping
from pathlib import Path

from largebatch.engine import Trainer
from largebatch.files.run_folder import Row, RunFolder
from largebatch.hooks.sinks import Tracker


class TensorBoard(Tracker):
    """Hides points that an interrupted run wrote after the resumed step."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = RunFolder(folder).tensorboard

    def open(self, trainer: Trainer) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds to import, and only rank 0 needs it
        except ImportError as error:
            raise ValueError(
                f"TensorBoard is not installed ({error}): run `python -m pip install tensorboard`, or set "
                "--log.to none."
            ) from error
        self.writer = SummaryWriter(str(self.folder), purge_step=trainer.state.step + 1)

    def write_epoch(self, row: Row) -> None:
        super().write_epoch(row)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

    def add(self, numbers: Mapping[str, float], row: Row) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, int(row["step"]))
