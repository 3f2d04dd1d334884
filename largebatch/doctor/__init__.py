"""Tell whether this installation can train: one cause and one command to fix it for each check that fails.

    python -m largebatch.doctor [--device auto|cpu|cuda] [--limit-s 120]

Most Horovod installations that fail do so late and oddly: an undefined symbol after torch was upgraded, an
MPI of the cluster loaded in place of the one that Horovod was built with, each process believing that it is
alone. So the checks go from what is cheap to look at up to what counts: two real processes, under each
launcher, that must reduce a tensor to the exact sum. The exit code is 0 only if every check passes.

    installation.py   packages, Horovod and what it was built for, launchers, compiler
    machine.py        names, limits and variables of this host and shell; GPUs
    launches.py       two real processes; which variable is to blame where they fail
    result.py         the form of an answer, and how programs are run for it

Why everything that touches Horovod or MPI runs in a child process: a wrong library does not raise, it kills
the process, and what broke in one check must not decide the next. For the same reason nothing of ours is
imported but these files.
"""
