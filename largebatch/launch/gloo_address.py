"""The address of a rank for Gloo, Horovod's or torch's.

Gloo connects to the address of each host's own name. On Debian that may be 127.0.1.1, which other hosts cannot reach:
Gloo would hang, so it is refused before the start.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class GlooAddress:
    """The address that a rank tells the others before they connect."""

    host: str
    node: str  # tells apart two groups of ranks on one host, such as two agents of torchrun
    address: str  # see `gloo_address`; empty if the host's own name does not resolve
    loopback: str  # the same text for two ranks that can reach each other at 127.0.0.1

    @property
    def label(self) -> str:
        """The name that Horovod is given for the host."""
        return f"{self.host}.{self.node}" if self.node else self.host


def own_address() -> str:
    """Return the address of this host's own name, at which Gloo listens; empty if it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def gloo_address(card: str) -> str:
    """Return the address at which Gloo listens with HOROVOD_GLOO_IFACE=card; empty if Gloo would crash."""
    own = own_address()
    return (card_address(card) or own) if own else ""  # Gloo looks up the host's name, though it does not use it then


def card_address(card: str) -> str:
    """Return the IPv4 address of a network card, empty if there is none."""
    import psutil

    found = [one.address for one in psutil.net_if_addrs().get(card, []) if one.family == socket.AF_INET]
    return found[0] if found else ""


def loopback_card() -> str:
    return next((card for _, card in socket.if_nameindex() if card_address(card) == LOOPBACK), "")


def store_address(host: str, *, one_host: bool) -> str:
    """Return the address at which rank 0 serves the store that all ranks look for at `host`; empty for all addresses.

    It is empty if `host` is not this host's, as with a Kubernetes service, and if it is a name for a loopback address
    although other hosts may come, which must be able to tell why they cannot stay.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda one: one[0] != socket.AF_INET)  # as Gloo knows IPv4 alone
    address = str(found[0][4][0])
    if host not in (address, "localhost") and address.startswith("127.") and not one_host:
        return ""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return ""
    return address


def loopback() -> str:
    """Return a text for the kernel and the network namespace, in which processes reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def on_one_host(addresses: Sequence[GlooAddress]) -> bool:
    return len({one.loopback for one in addresses}) == 1


def refuse_unreachable(addresses: Sequence[GlooAddress]) -> None:
    """Raise the same ValueError on all ranks if other hosts cannot reach a host at its address."""
    refuse_nameless(sorted({one.host for one in addresses if not one.address}))
    if not on_one_host(addresses):
        local = sorted({f"{one.host} ({one.address})" for one in addresses if one.address.startswith("127.")})
        if local:
            raise ValueError(
                f"The own name of {', '.join(local)} resolves to an address that other hosts cannot reach: give it "
                "the address of its network in /etc/hosts there."
            )


def refuse_nameless(hosts: Sequence[str]) -> None:
    """Raise ValueError if there are hosts whose own name does not resolve."""
    if hosts:
        raise ValueError(
            f"{', '.join(hosts)} cannot resolve its own name, and Gloo would crash: add a line with its address and "
            "its name to /etc/hosts there."
        )
