"""C++ kernels for CPUs, compiled on first use; and copies to a GPU.

    compile     compiles a C++ source, keeps the library in the user's cache and loads it
    lamb        LAMB's update: lamb.cpp, called by optim.lamb
    copies      copies between host and GPU that nobody waits for
    attention   VOLO's attention in bfloat16: attention.cpp; chooses the kernel of a model's attention layers
"""
