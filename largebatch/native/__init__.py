"""C++ kernels for CPUs, compiled on first use; and copies to a GPU."""
