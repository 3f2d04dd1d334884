"""Test whether this installation can train; each check that fails names one cause and one command to fix it.

    python -m largebatch.doctor [--device auto|cpu|cuda] [--limit-s 120]
    python -m largebatch.doctor --hosts a:2,b:2 [--data FOLDER]
    python -m largebatch.doctor --print -np 16 -H a:8,b:8 [-- PROGRAM ...]

Cheap checks come first. The last one counts: two real processes, under each launcher, must reduce a tensor to the exact
sum. Without Horovod, torchrun alone is tried. With --hosts the doctor checks each host alone, then every pair, then all
together. --print shows the commands that start a job on the hosts, and runs none of them. The exit code is 0 only if
every check passes: a Horovod that is broken fails, one that is not installed is a note.

Everything that touches Horovod or MPI runs in a child process, because a wrong library kills its process. For the same
reason the doctor imports only files of largebatch that need neither Horovod nor torch.
"""
