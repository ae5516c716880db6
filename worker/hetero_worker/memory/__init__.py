"""A rank's memory: the budget of the KV cache, what the device has left, and weights that wait on the host."""
