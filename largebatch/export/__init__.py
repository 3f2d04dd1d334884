"""Trained models for others: python -m largebatch.export. No Horovod and no data are needed."""
