"""CUDA device of a rank: its backend, and the driver's calls. Only ranks that compute on a GPU import it."""
