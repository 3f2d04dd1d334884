"""Test whether this installation can train; each check that fails names one cause and one command to fix it.

    python -m largebatch.doctor [--device auto|cpu|cuda] [--limit-s 120]
    python -m largebatch.doctor --hosts a:2,b:2 [--data FOLDER]
    python -m largebatch.doctor --print -np 16 -H a:8,b:8 [-- PROGRAM ...]

A broken Horovod installation often fails late and in confusing ways: torch was upgraded and a symbol is
undefined, or the MPI of the cluster is loaded instead of the one that Horovod was built with and each process
believes that it is alone. So the checks begin with the cheap ones and end with the one that counts: two real
processes, under each launcher, must reduce a tensor to the exact sum. With --hosts the doctor checks several
hosts in the same order: each host alone, then every pair, then all together. The exit code is 0 only if every
check passes. --print shows the commands that start a job on the hosts, and runs none of them.

Everything that touches Horovod or MPI runs in a child process: a wrong library does not raise an exception, it
kills the process, and one broken check must not affect the next. For the same reason the doctor imports only
files of largebatch that need neither Horovod nor torch: those of launch and process.
"""
