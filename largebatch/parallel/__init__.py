"""The add-on: axes inside a model replica (pipeline, sequence, tensor), beside Horovod's data axis, and ZeRO.

Training without an axis imports nothing of this folder.
"""
