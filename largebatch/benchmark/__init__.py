"""Compare our speed with that of the libraries a user would otherwise take: `python -m largebatch.benchmark NAME`.

    measure.py      the instrument: it runs the contenders in turns and writes the report
    ceiling.py      the FLOP/s that a device can reach, and the share that a model uses
    optimizer.py    a LAMB step
    loader.py       images out of JPEGs
    model.py        forward and backward pass of a model
    step.py         whole training steps on all ranks
    resident.py     such steps on batches that stay on the device
    solo.py         the only rank of a run, without Horovod
    unreduced.py    a rank that keeps its gradients to itself, for a step without its reduction
    parallel.py     a model that ranks share: bytes sent, time and memory
    scaling.py      join the tables of `step` at several numbers of ranks
    NOTES.md        where the time goes, and what was tried to save it
"""
