"""Triton kernels for NVIDIA GPUs; each is tested against a reference in plain PyTorch."""
