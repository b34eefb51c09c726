"""The CUDA kernels of csrc/cuda, executed on the CPU: no GPU, no nvcc."""
