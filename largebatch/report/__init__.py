"""Reports on finished or running runs, made from their folders alone: no Horovod, no GPU, no data.

    diff.py    the first option, version, image, step and tensor in which two runs differ
"""
