"""Linear layers of GPUs by our Triton kernels. Import it only where Triton is installed."""
