"""The two servers at which ranks meet before Gloo connects them. Each listens at one address of the host.

Horovod's own server and torch's store would listen at all addresses and answer everybody, and whoever writes to them
decides whom the ranks talk to (SECURITY.md).
"""

import hmac
import secrets
import socket
import socketserver
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from http import HTTPStatus
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

REQUEST_S = 10.0  # for a whole request and its answer, of a few hundred bytes


class AddressServer(RendezvousHTTPServer):
    """Horovod's server of addresses in a thread, which refuses requests without its secret."""

    # Nobody waits for the thread of a request: a stranger can make it last.
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, slots: Sequence[SlotInfo]) -> None:
        """Start. slots: the ranks that will come; an address is kept until the last of them has read it."""
        super().__init__((address, 0), _Handler, 0)
        self.secret = secrets.token_hex(16)
        self.init(slots)
        self._thread = threading.Thread(target=self.serve_forever, name="addresses of ranks", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without a look-up of the host's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    @property
    def host(self) -> str:
        """HOROVOD_GLOO_RENDEZVOUS_ADDR: in Horovod's http://HOST:PORT/SCOPE/KEY, the secret begins the path."""
        return f"{self.server_name}:{self.server_port}/{self.secret}"

    def stop(self) -> None:
        """End the thread and close the port; do not wait for requests under way."""
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(RendezvousHandler):
    """Passes requests with the secret on to Horovod, and ends each after REQUEST_S."""

    def setup(self) -> None:
        super().setup()
        self._limit = threading.Timer(REQUEST_S, self._hang_up)
        self._limit.daemon = True
        self._limit.start()

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):  # the other side has
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        if self._is_admitted():
            super().do_GET()

    def do_PUT(self) -> None:
        if self._is_admitted():
            super().do_PUT()

    def do_DELETE(self) -> None:
        if self._is_admitted():
            super().do_DELETE()

    def do_HEAD(self) -> None:
        """Refuse: Python's handler would look for a file."""
        self.send_status_code(HTTPStatus.FORBIDDEN)

    path: str

    def _is_admitted(self) -> bool:
        """Take the secret off the path. If it is missing or wrong, answer the request and return False."""
        _, _, path = self.path.partition("/")
        first, _, rest = path.partition("/")
        given = first.partition(":")[0]  # Horovod appends a port
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.secret.encode()):
            self.send_status_code(HTTPStatus.FORBIDDEN)
            return False
        self.path = f"/{rest}"
        return True


def serve_store(address: str, port: int = 0, *, limit: timedelta = timedelta(seconds=300)) -> Any:
    """Return a store of torch that this process serves; OSError if it cannot listen at the IP address.

    port: 0 for any free one. limit: the longest wait for a key.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=2048)
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening.detach()
    )
