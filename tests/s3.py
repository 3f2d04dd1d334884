"""A real S3 server on this host, moto's, in a process of its own, and a cable to it that tests may cut."""

import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

SECRET = "a-secret-that-nobody-writes-down"
WAIT_S = 120


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Poll a condition, with a generous limit."""
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


@contextmanager
def server(log: Path, *buckets: str) -> Iterator[int]:
    """Start a server with these buckets; yield its port."""
    for package in ("s3fs", "moto"):
        pytest.importorskip(package, reason=f"{package} is not installed: it comes with the extra remote of setup.cfg")
    with open(log, "w") as file:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        port = re.compile(r"Running on http://127.0.0.1:(\d+)")
        wait_until(lambda: port.search(log.read_text()) or process.poll() is not None, log.read_text())
        (found,) = port.findall(log.read_text())
        for bucket in buckets:
            client(int(found)).create_bucket(Bucket=bucket)
        yield int(found)
    finally:
        process.kill()
        process.wait()


def environment(port: int) -> dict[str, str]:
    """The variables by which a user gives the address and credentials of a store; a failed call is not repeated."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_MAX_ATTEMPTS")
    return dict(zip(names, ("testing", SECRET, "us-east-1", f"http://127.0.0.1:{port}", "1")))


def use(port: int) -> None:
    """Let this process use the store, in place of one that it has used before."""
    from s3fs import S3FileSystem

    os.environ |= environment(port)
    S3FileSystem.clear_instance_cache()


def client(port: int) -> Any:
    """Another program than ours."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", aws_access_key_id="testing",
        aws_secret_access_key=SECRET,
    )  # fmt: skip


def keys(port: int) -> list[str]:
    """The names of all objects in the bucket."""
    pages = client(port).get_paginator("list_objects_v2").paginate(Bucket="bucket")
    return [found["Key"] for page in pages for found in page.get("Contents", ())]


class Cable(socketserver.ThreadingTCPServer):
    """Forwards connections to a port, and calls `cut` after `length` bytes to it, or at a piece that has `word`."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.to, self.whole = port, True
        self.length, self.word, self.cut = float("inf"), b"", lambda: None
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def count(self, data: bytes) -> None:
        with self._lock:
            reached = 0 < self.length <= len(data) or self.word and self.word in data
            self.length -= len(data)
        if reached:
            self.cut()

    @classmethod
    @contextmanager
    def laid(cls, port: int) -> Iterator["Cable"]:
        with cls(port) as cable:
            threading.Thread(target=cable.serve_forever, args=(0.01,), daemon=True).start()
            try:
                yield cable
            finally:
                cable.shutdown()


class _Forward(socketserver.BaseRequestHandler):
    server: Cable

    def handle(self) -> None:
        if not self.server.whole:
            return
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.to)) as there:
            threading.Thread(target=self.back, args=(there,), daemon=True).start()
            while self.server.whole and (data := self.request.recv(2**14)):
                self.server.count(data)
                there.sendall(data)

    def back(self, there: socket.socket) -> None:
        with suppress(OSError):
            while data := there.recv(2**14):
                self.request.sendall(data)
