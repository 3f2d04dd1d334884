"""The numbers of a run at MLflow, with --log.to mlflow. MLFLOW_TRACKING_URI and its other variables hold."""

import os
import threading
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

from largebatch.engine import Trainer
from largebatch.files.names import without_password
from largebatch.files.run_folder import Row
from largebatch.hooks.sinks import Tracker
from largebatch.process.background import in_background
from largebatch.report.history import identity

EXPERIMENT, TAG = "largebatch", "largebatch.run"  # the first unless MLFLOW_EXPERIMENT_NAME is set
MOST, CLOSE_S = 100, 30.0  # values in a request; the longest wait at the end
# Unless these are set, MLflow tries for minutes to reach a server, and prints lines of its own.
QUICK = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
QUIET = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


class MLflow(Tracker):
    """Sends the numbers by their step, in a thread. A resumed run goes on with the same entry."""

    def __init__(self, folder: str | Path, options: Mapping[str, Any]) -> None:
        self.folder, self.options, self.lock = Path(folder), dict(options), threading.Lock()
        self.waiting: list[Any] = []  # numbers that are not there yet
        self.sending: futures.Future[None] | None = None

    def open(self, trainer: Trainer) -> None:
        os.environ |= QUICK | QUIET | os.environ
        try:
            import mlflow
            self.mlflow, self.client = mlflow, mlflow.MlflowClient()
            self.run = self.find_run(self.folder.resolve())
        except Exception as error:  # MLflow's, or those of its databases
            why = "is not installed" if isinstance(error, ImportError) else "does not start"
            remedy = "run `python -m pip install mlflow`, set MLFLOW_TRACKING_URI, or leave the name out"
            raise ValueError(f"--log.to has mlflow, which {why} ({without_password(error)}): {remedy}.") from error

    def find_run(self, place: Path) -> str:
        """Return the entry of a run folder, made if it is missing. Its parameters stay those of the first start."""
        name, tags = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT), {TAG: identity(place)}
        experiment = self.client.get_experiment_by_name(name)
        inside = experiment.experiment_id if experiment else self.client.create_experiment(name)
        found = self.client.search_runs([inside], f"tags.`{TAG}` = '{tags[TAG]}'", max_results=1)
        run = found[0] if found else self.client.create_run(inside, run_name=place.name, tags=tags)
        self.client.update_run(run.info.run_id, status="RUNNING")
        new = {name: str(value) for name, value in self.options.items() if name not in run.data.params}
        params = [self.mlflow.entities.Param(*one) for one in new.items()]
        for first in range(0, len(params), MOST):
            self.client.log_batch(run.info.run_id, params=params[first : first + MOST])
        return run.info.run_id

    def add(self, numbers: Mapping[str, float], row: Row) -> None:
        at, before = (1000 * round(row["time"]), int(row["step"])), self.sending
        self.waiting += [self.mlflow.entities.Metric(name, value, *at) for name, value in numbers.items()]
        if before is None or before.done():
            self.sending = in_background(self.send, name="largebatch-mlflow")
            if before:
                before.result()  # or its error

    def send(self, *, end: bool = False) -> None:
        try:
            with self.lock:
                while some := self.waiting[:MOST]:
                    self.client.log_batch(self.run, metrics=some)
                    del self.waiting[: len(some)]
                if end:
                    self.client.set_terminated(self.run)
        except Exception as error:
            raise OSError(f"{without_password(error)}; {len(self.waiting)} numbers wait to be sent") from error

    def close(self) -> None:
        last = in_background(lambda: self.send(end=True), name="largebatch-mlflow")
        if futures.wait([last], CLOSE_S).not_done:
            raise OSError(f"no answer in {CLOSE_S:.0f} s; {len(self.waiting)} numbers are not there")
        last.result()
