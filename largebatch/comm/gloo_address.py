"""Where a rank is, for ranks that are to reach each other by Gloo, Horovod's or torch's.

Gloo connects to the address of each host's own name. On Debian that may be 127.0.1.1, which is another host to
everyone: said before the start, instead of a hang.
"""

import os
import socket
from dataclasses import dataclass
from typing import Sequence


@dataclass(frozen=True)
class Place:
    """What a rank tells the others before they connect."""

    host: str
    node: str  # tells two groups of ranks on one host apart, as two agents of torchrun
    address: str  # of the host's own name, as Gloo looks it up; empty where it does not resolve
    loopback: str  # the same for two ranks that share 127.0.0.1
    port: int = 0  # of rank 0's server

    @property
    def label(self) -> str:
        """The host as Horovod is told it."""
        return f"{self.host}.{self.node}" if self.node else self.host


def own_address() -> str:
    """The address of this host's own name, at which Gloo listens; empty if it has none, of which Gloo would crash."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def loopback() -> str:
    """The same for processes that can reach each other at 127.0.0.1: one kernel, one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def refuse_unreachable(places: Sequence[Place]) -> None:
    """ValueError, on all ranks alike, for a host that others cannot reach at its address."""
    refuse_nameless(sorted({place.host for place in places if not place.address}))
    if len({place.loopback for place in places}) > 1:
        local = sorted({f"{place.host} ({place.address})" for place in places if place.address.startswith("127.")})
        if local:
            raise ValueError(
                f"The own name of {', '.join(local)} resolves to an address that other hosts cannot reach: give it "
                "the address of its network in /etc/hosts there."
            )


def refuse_nameless(hosts: Sequence[str]) -> None:
    """ValueError for hosts, of which there should be none, whose own name does not resolve."""
    if hosts:
        raise ValueError(
            f"{', '.join(hosts)} cannot resolve its own name, and Gloo would crash: add a line with its address and "
            "its name to /etc/hosts there."
        )
