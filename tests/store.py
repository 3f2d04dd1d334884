"""An S3 server on this machine (moto's), behind a proxy that delays answers, loses them, cuts them or refuses.

    python -m tests.store 0.05 FOLDER python -m largebatch.benchmark loader --data s3://bucket/data
"""

import http.client
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from largebatch.data import remote

KEY, SECRET = "AKIAOFTHISTEST", "a-secret-of-this-test"
NEEDS = "is not installed: pip install s3fs 'moto[server]'"
REFUSALS = {
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "500": (500, "InternalError", "We encountered an internal error."),
    "403": (403, "AccessDenied", "Access Denied"),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
}


class Store(ThreadingHTTPServer):
    """The proxy. `asked` has the requests so far; `fault` says what happens to one: a key of REFUSALS, reset or cut."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, server: int, delay_s: float = 0) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.server, self.delay_s, self.lock = server, delay_s, threading.Lock()
        self.asked: list[str] = []
        self.fault: Callable[[int, str], str] = lambda number, request: ""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_address[1]}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, folder: Path, place: str) -> str:
        """Copy a folder to bucket/prefix, in place of what is there of the same names; return its address."""
        self.call("PUT", place.partition("/")[0])
        for path in folder.rglob("*"):
            if path.is_file():
                self.call("PUT", f"{place}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{place}"

    def call(self, method: str, path: str, body: bytes = b"") -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server)
        owner = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"}
        connection.request(method, f"/{path}", body, owner)
        response = connection.getresponse()
        assert response.status in (200, 204), (path, response.status, response.read())
        connection.close()

    def reads(self, name: str = "/train-") -> list[str]:
        """The requests for bytes of shards."""
        return [request for request in self.asked if name in request and "bytes=" in request]


class Request(BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        request = f"{self.command} {self.path} {self.headers.get('Range', '')}"
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(request)
        fault = self.server.fault(number, request)
        time.sleep(self.server.delay_s)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fault in REFUSALS:
            status, code, message = REFUSALS[fault]
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self._answer(status, {"Content-Type": "application/xml"}, body, len(body))
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server)
        connection.request(self.command, self.path, headers=dict(self.headers))
        response = connection.getresponse()
        body = response.read()
        connection.close()
        headers = {name: response.headers[name] for name in ("ETag", "Content-Type") if name in response.headers}
        length = int(response.headers.get("Content-Length", len(body)))
        self._answer(response.status, headers, body[: len(body) // 2] if fault == "cut" else body, length)
        self.close_connection |= fault == "cut"

    do_HEAD = do_GET

    def _answer(self, status: int, headers: dict[str, str], body: bytes, length: int) -> None:
        self.send_response(status)
        for name, text in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def open_store(delay_s: float = 0) -> Iterator[Store]:
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package, reason=f"{package} {NEEDS}")
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # these are connected to the server of another test
    remote._store.cache_clear()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    store = Store(server.get_host_and_port()[1], delay_s)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    yield store
    store.shutdown()
    store.server_close()
    server.stop()


def main() -> int:
    """Run a command that reads a folder as s3://bucket/data from a server with slow answers."""
    delay_s, folder, *command = sys.argv[1:]
    with open_store(float(delay_s)) as store:
        store.put(Path(folder), "bucket/data")
        code = subprocess.run(command, env=os.environ | store.environment).returncode
        print(f"{len(store.asked)} requests, {len(store.reads())} for bytes of training shards")
    return code


if __name__ == "__main__":
    sys.exit(main())
