"""Triton kernels for GPUs, and thin launchers. Import them only where a rank has a GPU, or tests interpret them.

`availability`, which tells whether the kernels can be used, and `expert_choice` need no Triton themselves.
"""
