"""C++ kernels for CPUs, compiled on first use."""
