"""The address of a rank for Gloo, Horovod's or torch's.

Gloo connects to the address of each host's own name. On Debian that may be 127.0.1.1, at which every other host finds
only itself. The functions here report that before the start, as Gloo would hang.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GlooAddress:
    """The address that a rank tells the others before they connect."""

    host: str
    node: str  # tells apart two groups of ranks on one host, such as two agents of torchrun
    address: str  # that of the host's own name, as Gloo looks it up; empty if the name does not resolve
    loopback: str  # the same text for two ranks that can reach each other at 127.0.0.1
    port: int = 0  # that of rank 0's server

    @property
    def label(self) -> str:
        """The name that Horovod is given for the host."""
        return f"{self.host}.{self.node}" if self.node else self.host


def own_address() -> str:
    """Return the address of this host's own name, at which Gloo listens; empty if it has none (Gloo would crash)."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def loopback() -> str:
    """Return a text shared by the processes that reach each other at 127.0.0.1: one kernel, one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def refuse_unreachable(addresses: Sequence[GlooAddress]) -> None:
    """Raise ValueError, the same on all ranks, if other hosts cannot reach a host at its address."""
    refuse_nameless(sorted({one.host for one in addresses if not one.address}))
    if len({one.loopback for one in addresses}) > 1:
        local = sorted({f"{one.host} ({one.address})" for one in addresses if one.address.startswith("127.")})
        if local:
            raise ValueError(
                f"The own name of {', '.join(local)} resolves to an address that other hosts cannot reach: give it "
                "the address of its network in /etc/hosts there."
            )


def refuse_nameless(hosts: Sequence[str]) -> None:
    """Raise ValueError if the list is not empty. hosts: those whose own name does not resolve."""
    if hosts:
        raise ValueError(
            f"{', '.join(hosts)} cannot resolve its own name, and Gloo would crash: add a line with its address and "
            "its name to /etc/hosts there."
        )
