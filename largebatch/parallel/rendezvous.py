"""Start torch.distributed beside Horovod."""

import os

import torch
import torch.distributed as dist

from largebatch.launch import meeting
from largebatch.parallel import mesh
from largebatch.ranks import Ranks


def start_torch_distributed(comm: Ranks, device: torch.device) -> None:
    """Start torch.distributed, if it is not running; it ends before Horovod does. If one rank fails, all raise."""
    if dist.is_initialized():
        return
    with comm.together("starting torch.distributed"):
        mine = meeting.place_here(os.environ)
    places = comm.allgather_object(mine, name="parallel/places")
    store = None
    with comm.together("starting torch.distributed"):
        host = meeting.listen_nowhere_else(places, os.environ)
        if comm.rank == 0:
            store = meeting.serve_store(host)
    port = comm.broadcast_object(store.port if store else None, name="parallel/port")
    store = store or dist.TCPStore(host, port, None, is_master=False)
    mesh.start_process_groups(comm.rank, comm.size, store, device=device, limit_s=comm.stall_limit_s)
    comm.before_shutdown(mesh.stop_process_groups)
