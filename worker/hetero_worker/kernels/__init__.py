"""Kernels for GPUs, in Triton: imported only where a rank computes on one, or a test interprets them."""
