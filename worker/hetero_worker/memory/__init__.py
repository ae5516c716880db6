"""What lies in a rank's memory: weights read slice by slice, and the budget of the KV cache."""
