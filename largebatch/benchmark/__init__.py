"""Compare our speed with that of the libraries a user would otherwise take: `python -m largebatch.benchmark NAME`."""
