"""python -m largebatch.reproduce: accuracy against batch size for several optimizers tuned alike."""
