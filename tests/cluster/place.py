"""Each rank writes what Horovod says of its place into a file of its number: `python -m tests.cluster.place FOLDER`."""

import socket
import sys

import horovod.torch as hvd

hvd.init()
place = hvd.rank(), socket.gethostname(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
with open(f"{sys.argv[1]}/{hvd.rank()}", "w") as file:
    print(*place, file=file)
