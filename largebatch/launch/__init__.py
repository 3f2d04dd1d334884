"""Starts ranks, with the standard library and Horovod's servers."""
