"""C++ kernels for CPUs that multiply bfloat16 in hardware, behind a C ABI. Torch computes the same where they do not fit."""
