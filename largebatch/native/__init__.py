"""C++ kernels for CPUs, compiled on first use.

    compile     compiles a C++ source, keeps the library in the user's cache and loads it
    lamb        LAMB's update: lamb.cpp, called by optim.lamb
    attention   VOLO's attention in bfloat16: attention.cpp; chooses the kernel of a model's attention layers
"""
