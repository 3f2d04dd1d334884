"""The add-on: axes inside a model replica (pipeline, sequence, tensor), beside Horovod's data axis, and ZeRO.

config/parallel.py defines the axes. Training without an axis imports nothing of this folder.

    mesh.py             the rank's place on each axis, and the group of ranks along it
    rendezvous.py       start torch.distributed beside Horovod
    collectives.py      move tensors along an axis, with or without a gradient
    cuts.py             which part of each parameter is on which rank
    tensor.py           layers whose matrices are cut in one, two, two and a half or three dimensions
    vit.py volo.py      put these layers into a ViT or a VOLO
    loss.py             the objective, computed from parts of the logits
    sequence.py         ring attention: each rank has some of the tokens
    pipeline.py         stages of a ViT, and the batch that goes through them
    state_sharding.py   which slice of the parameters each data rank updates (ZeRO stage 1)
    sharded_lamb.py     LAMB with norms of whole tensors of which each rank has a part
    replica.py          all of it behind the engine's `Replica`, and the plain checkpoint
"""
