"""Each rank writes its place, as Horovod gives it, into a file: `python -m tests.cluster.place FOLDER`."""

import socket
import sys

import horovod.torch as hvd

hvd.init()
place = hvd.rank(), socket.gethostname(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
with open(f"{sys.argv[1]}/{hvd.rank()}", "w") as file:
    print(*place, file=file)
