"""Start torch.distributed beside Horovod: where its ranks meet, and the addresses at which they talk.

Horovod, which is there already, tells everyone where everyone is. On one host that is 127.0.0.1; between hosts the
addresses of their own names, or those of the network card that GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE names, as
mpi_scripts/env.sh does for INTERFACE.
"""

import os
import socket
from collections.abc import MutableMapping

import psutil
import torch
import torch.distributed as dist

from largebatch.comm import Communicator
from largebatch.comm.gloo_address import GlooAddress, loopback, own_address, refuse_unreachable
from largebatch.parallel import mesh


def start_torch_distributed(comm: Communicator, device: torch.device) -> None:
    """Start torch.distributed, unless the program has; it ends before Horovod does. All ranks raise alike."""
    if dist.is_initialized():
        return
    with comm.together("starting torch.distributed"):
        mine = GlooAddress(socket.gethostname(), "", address_here(os.environ), loopback())
    places = comm.allgather_object(mine, name="parallel/places")
    store = None
    with comm.together("starting torch.distributed"):
        one_host = len({place.loopback for place in places}) == 1
        if not one_host:
            refuse_unreachable(places)
        host = "127.0.0.1" if one_host else places[0].address
        if comm.rank == 0:
            store = dist.TCPStore(host, 0, None, is_master=True, wait_for_workers=False)
    port = comm.broadcast_object(store.port if store else None, name="parallel/port")
    store = store or dist.TCPStore(host, port, None, is_master=False)
    mesh.start_process_groups(comm.rank, comm.size, store, device=device, limit_s=comm.stall_limit_s)
    comm.before_shutdown(mesh.stop_process_groups)


def address_here(environment: MutableMapping[str, str]) -> str:
    """At which other ranks find this one; torch's Gloo is told of a network card that Horovod's was told of."""
    cards = environment.get("GLOO_SOCKET_IFNAME") or environment.get("HOROVOD_GLOO_IFACE", "")
    if not cards:
        return own_address()
    card, known = cards.partition(",")[0], psutil.net_if_addrs()
    addresses = [address.address for address in known.get(card, []) if address.family == socket.AF_INET]
    if not addresses:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE is {cards}, and {socket.gethostname()} has no network card "
            f"{card} with an IPv4 address: expected one of {', '.join(sorted(known))}."
        )
    environment["GLOO_SOCKET_IFNAME"] = cards
    return addresses[0]
