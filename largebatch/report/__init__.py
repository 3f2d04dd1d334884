"""Reports on finished or running runs, made from their folders alone: no Horovod, no GPU, no data.

    diff.py       the first option, version, image, step and tensor in which two runs differ
    summary.py    the block at the end of a run: accuracy, time, files, and the commands that go on with it
"""
