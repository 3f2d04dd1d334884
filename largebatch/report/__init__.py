"""Reports on finished or running runs, made from their folders alone: no Horovod, no GPU, no data."""
