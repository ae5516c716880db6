"""CUDA device of a rank: the device, its streams and pinned memory. Only ranks that compute on a GPU import it."""
