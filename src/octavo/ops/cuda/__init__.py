"""Triton kernels for NVIDIA GPUs; each has its judge in plain PyTorch."""
