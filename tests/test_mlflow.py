"""The numbers of a run at a real MLflow server, in a process of its own with a database of its own."""

import math
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import pytest
import s3
from launch import launch
from runs import SMALL
from test_hooks import epoch_row, step_row, trainer_at

from largebatch import hooks

SHORT = ["--img-size", "32", "--data.global_batch_size", "16", "--data.micro_batch_size", "16"]
SHORT += ["--run.duration", "4 steps", "--log.every", "1 steps"]


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    pytest.importorskip("mlflow", reason="mlflow is not installed: it comes with the extra mlflow of setup.cfg")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", str(folder)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words], stdout=log, stderr=log, cwd=folder, start_new_session=True,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
        except OSError:
            return process.poll() is not None

    try:
        s3.wait_until(answers, (folder / "log").read_text())
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def cable(port, monkeypatch) -> Iterator[s3.Cable]:
    """The way to the server; a failed request is not repeated."""
    with s3.Cable.laid(port) as cable:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{cable.port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
        monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield cable


def entry(port: int, name: str):
    """The one entry of this name, and its losses by step."""
    from mlflow import MlflowClient

    client = MlflowClient(f"http://127.0.0.1:{port}")
    experiment = client.get_experiment_by_name("largebatch")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    return run, sorted((metric.step, metric.value) for metric in history)


def test_mlflow_has_the_numbers_and_a_resumed_run_goes_on_with_its_entry(cable, tmp_path):
    """Steps that a resumed run writes again are kept, too; options that changed keep their first value."""
    for first, last, lr in ((1, 8, 0.5), (6, 10, 0.25)):
        sink = hooks.MLflow(tmp_path, {"optim.lr": lr} | {f"option.{number}": "" for number in range(250)})
        sink.open(trainer_at(first - 1))
        run, _ = entry(cable.to, tmp_path.name)
        assert run.info.status == "RUNNING"
        for step in range(first, last + 1):
            sink.write_step(step_row(step, time=1e9 + first, images_per_s=math.nan if step == 1 else 5.0))
        sink.write_epoch(epoch_row(last, time=1e9))
        sink.close()
    run, losses = entry(cable.to, tmp_path.name)
    assert losses == sorted((step, 2 / step) for step in (*range(1, 9), *range(6, 11)))
    assert run.info.status == "FINISHED" and run.data.params["optim.lr"] == "0.5" and len(run.data.params) == 251
    assert run.data.metrics["epoch/top1"] == 60.0 and "epoch/ema_top1" not in run.data.metrics


def test_a_server_that_is_away_gets_the_numbers_when_it_is_back(cable, tmp_path):
    sink = hooks.MLflow(tmp_path, {})
    sink.open(trainer_at(0))
    sink.write_step(step_row(1, time=1e9))
    s3.wait_until(sink.sending.done, "the first numbers")
    cable.whole = False
    sink.write_step(step_row(2, time=1e9))
    s3.wait_until(sink.sending.done, "the failure")
    with pytest.raises(OSError, match="API request to .* numbers wait to be sent"):
        sink.write_step(step_row(3, time=1e9))
    s3.wait_until(sink.sending.done, "the second failure")
    cable.whole = True
    sink.close()
    assert entry(cable.to, tmp_path.name)[1] == [(1, 2.0), (2, 1.0), (3, 2 / 3)] and sink.waiting == []


def test_more_numbers_than_a_request_takes_all_arrive(cable, tmp_path):
    """The server is away while 40 rows are written."""
    sink = hooks.MLflow(tmp_path, {})
    sink.open(trainer_at(0))
    cable.whole = False
    for step in range(1, 41):
        with suppress(OSError):
            sink.write_step(step_row(step, time=1e9))
    s3.wait_until(sink.sending.done, "the failure")
    cable.whole = True
    sink.close()
    assert entry(cable.to, tmp_path.name)[1] == [(step, 2 / step) for step in range(1, 41)]


def test_a_server_that_hangs_does_not_keep_a_run_from_ending(cable, tmp_path, monkeypatch):
    sink = hooks.MLflow(tmp_path, {})
    sink.open(trainer_at(0))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections and never answers
        monkeypatch.setattr(sink.client, "log_batch", lambda *arguments, **options: silent.accept()[0].recv(1))
        monkeypatch.setattr("largebatch.hooks.mlflow.CLOSE_S", 0.1)
        sink.write_step(step_row(1, time=1e9))
        with pytest.raises(OSError, match="no answer in 0 s; 5 numbers are not there"):
            sink.close()
        with socket.create_connection(silent.getsockname()):
            pass  # which lets the thread end


def test_no_mlflow_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match="--log.to has mlflow, which is not installed .*pip install mlflow"):
        hooks.MLflow(tmp_path, {}).open(trainer_at(0))


@pytest.mark.parametrize("address", ["http://name:word@127.0.0.1:9", "nothing://here"])
def test_no_server_is_one_clear_error(cable, tmp_path, monkeypatch, address):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    said = r"--log.to has mlflow, which does not start \(.*\): .* set MLFLOW_TRACKING_URI, "
    with pytest.raises(ValueError, match=said) as caught:
        hooks.MLflow(tmp_path, {}).open(trainer_at(0))
    assert "word" not in str(caught.value)


def test_a_run_whose_server_goes_away_goes_on(cable, tmp_path):
    """The cable is cut when the numbers of a step are there; the warning is one."""
    cable.word, cable.cut = b"train/loss", lambda: setattr(cable, "whole", False)
    options = [*SMALL, *SHORT, "--log.to", "mlflow,tensorboard", "--run.folder", str(tmp_path)]
    code, output = launch(["-m", "largebatch.train", *options], ranks=1, launcher="python")
    assert code == 0 and output.count("MLflow failed at step ") == 1 and "Traceback" not in output, output
    assert "complete, step 4 of 4" in output and (tmp_path / "tensorboard").is_dir() and "View run" not in output
