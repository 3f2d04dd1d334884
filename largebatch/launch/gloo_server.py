"""The two servers at which ranks meet before Gloo connects them. Each listens at one address of the host.

Horovod's own server and torch's store would listen at all addresses and answer everybody. Gloo believes what it reads
there, so whoever writes to them decides whom the ranks talk to (SECURITY.md).
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


class AddressServer:
    """Horovod's server of addresses in a thread. It listens at one address, and refuses requests without its secret."""

    def __init__(self, address: str, slots: Sequence[SlotInfo]) -> None:
        """Start. slots: the ranks that will come; an address is kept until the last of them has read it."""
        self.secret = secrets.token_hex(16)
        self._server = _Server((address, 0), _Handler, 0)
        self._server.secret = self.secret
        self._server.init(slots)
        self._thread = threading.Thread(target=self._server.serve_forever, name="addresses of ranks", daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        """The text for HOROVOD_GLOO_RENDEZVOUS_ADDR.

        Horovod asks for http://HOST:PORT/SCOPE/KEY. With a host of ADDRESS:PORT/SECRET, the secret becomes the first
        part of the path.
        """
        address, port = self._server.server_address[:2]
        return f"{address}:{port}/{self.secret}"

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_address[1])

    def stop(self) -> None:
        """End the thread and close the port. Requests under way are left to themselves."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(RendezvousHTTPServer):
    secret = ""
    # Nobody waits for the thread of a request: a stranger can make it last.
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """Listen without a look-up of the host's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]


class _Handler(RendezvousHandler):
    """Passes requests with the secret on to Horovod, and ends each after REQUEST_S. (Horovod limits single reads.)"""

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
        """Refuse: Python's handler, from which Horovod's is derived, would look for a file."""
        self.send_status_code(HTTPStatus.FORBIDDEN)

    path: str

    def _is_admitted(self) -> bool:
        """Take the secret off the path; answer the request, and return False, if it is missing or wrong."""
        _, _, path = self.path.partition("/")
        first, _, rest = path.partition("/")
        given = first.partition(":")[0]  # Horovod appends a port
        if not hmac.compare_digest(given.encode(errors="replace"), self.server.secret.encode()):
            self.send_status_code(HTTPStatus.FORBIDDEN)
            return False
        self.path = f"/{rest}"
        return True


def serve_store(address: str, port: int = 0, *, limit: timedelta = timedelta(seconds=300)) -> Any:
    """Return a store of torch that this process serves; OSError if it cannot listen at the address.

    address: an IP address of this host. port: 0 for any free one. limit: the longest wait for a key.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=2048)
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening.detach()
    )
