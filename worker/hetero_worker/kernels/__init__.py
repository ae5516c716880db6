"""Kernels for GPUs, in Triton, and thin launchers: imported only where a rank computes on one, or tests interpret them.

But for `availability`, which needs no Triton: it says whether the others can be had.
"""
