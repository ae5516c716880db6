"""Triton kernels for GPUs, and thin launchers. Import them only where a rank has a GPU, or tests interpret them.

`availability` is the exception: it needs no Triton, and tells whether the kernels can be used.
"""
