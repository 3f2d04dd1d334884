"""python -m largebatch.reproduce: accuracy against batch size for several optimizers, each tuned with the same budget.

    contenders.py   the optimizers that are compared, as data
    experiment.py   data, batches, epochs and seeds; the config of each trial
    search.py       which learning rates are tried: a grid, then finer around the best
    images.py       small images in memory, as the loaders would give them
    trial.py        one training run on one thread
    workers.py      processes that train, one trial each at a time
    results.py      a file for each finished trial, and the trials that come next
    table.py        results.csv, and the table of means and spreads
    picture.py      accuracy and steps against the batch
"""
