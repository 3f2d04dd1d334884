"""Tell whether this installation can train: one cause and one command to fix it for each check that fails.

    python -m largebatch.doctor [--device auto|cpu|cuda] [--limit-s 120]
    python -m largebatch.doctor --hosts a:2,b:2 [--data FOLDER]
    python -m largebatch.doctor --print -np 16 -H a:8,b:8 [-- PROGRAM ...]

Most Horovod installations that fail do so late and oddly: an undefined symbol after torch was upgraded, an
MPI of the cluster loaded in place of the one that Horovod was built with, each process believing that it is
alone. So the checks go from what is cheap to look at up to what counts: two real processes, under each
launcher, that must reduce a tensor to the exact sum. With --hosts several hosts are looked at in the same
order: each by itself, then every two of them, then all. The exit code is 0 only if every check passes.
--print shows the commands that start a job on the hosts, and runs none of them.

    installation.py   packages, Horovod and what it was built for, launchers, compiler
    machine.py        names, limits and variables of this host and shell; GPUs
    launches.py       two real processes; which variable is to blame where they fail
    hosts.py          several hosts before MPI is used: reach, clocks, data, versions, interfaces
    network.py        messages between every two hosts, sums over all; exchange.py is what their ranks run
    commands.py       the mpirun, horovodrun, srun and sbatch commands for several hosts
    result.py         the form of an answer, and how programs are run for it

Why everything that touches Horovod or MPI runs in a child process: a wrong library does not raise, it kills
the process, and what broke in one check must not decide the next. For the same reason nothing of ours is
imported but these files.
"""
