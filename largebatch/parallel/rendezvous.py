"""Start torch.distributed beside Horovod: choose the addresses at which its ranks meet and communicate.

On one host the address is 127.0.0.1. Between hosts it is that of each host's name, or of the network card that
GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE names (mpi_scripts/env.sh sets them from INTERFACE).
"""

import os
import socket
from collections.abc import MutableMapping

import psutil
import torch
import torch.distributed as dist

from largebatch.launch.gloo_address import (
    LOOPBACK,
    GlooAddress,
    card_address,
    loopback,
    loopback_card,
    on_one_host,
    own_address,
    refuse_unreachable,
)
from largebatch.launch.gloo_server import serve_store
from largebatch.parallel import mesh
from largebatch.ranks import Ranks


def start_torch_distributed(comm: Ranks, device: torch.device) -> None:
    """Start torch.distributed, if it is not running; it ends before Horovod does. If one rank fails, all raise."""
    if dist.is_initialized():
        return
    with comm.together("starting torch.distributed"):
        mine = GlooAddress(socket.gethostname(), "", address_here(os.environ), loopback())
    places = comm.allgather_object(mine, name="parallel/places")
    store = None
    with comm.together("starting torch.distributed"):
        if on_one_host(places):
            host = LOOPBACK
            if card := loopback_card():
                os.environ.setdefault("GLOO_SOCKET_IFNAME", card)  # so that torch's Gloo listens nowhere else
        else:
            refuse_unreachable(places)
            host = places[0].address
        if comm.rank == 0:
            store = serve_store(host)
    port = comm.broadcast_object(store.port if store else None, name="parallel/port")
    store = store or dist.TCPStore(host, port, None, is_master=False)
    mesh.start_process_groups(comm.rank, comm.size, store, device=device, limit_s=comm.stall_limit_s)
    comm.before_shutdown(mesh.stop_process_groups)


def address_here(environment: MutableMapping[str, str]) -> str:
    """The address at which other ranks find this one. If only Horovod's variable names a card, set torch's as well."""
    cards = environment.get("GLOO_SOCKET_IFNAME") or environment.get("HOROVOD_GLOO_IFACE", "")
    if not cards:
        return own_address()
    card = cards.partition(",")[0]
    address = card_address(card)
    if not address:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE is {cards}, and {socket.gethostname()} has no network card "
            f"{card} with an IPv4 address: expected one of {', '.join(sorted(psutil.net_if_addrs()))}."
        )
    environment["GLOO_SOCKET_IFNAME"] = cards
    return address
