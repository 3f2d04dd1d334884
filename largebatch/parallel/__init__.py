"""The add-on: axes inside a model replica (pipeline, sequence, tensor), beside Horovod's data axis, and ZeRO.

shape.py says which axes there are, mesh.py makes their groups, collectives.py moves tensors along them, sharding.py
says what part of each parameter is where. Nothing of it is imported by a run without an axis.
"""
