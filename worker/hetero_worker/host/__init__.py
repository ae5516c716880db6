"""Machine under a rank: cores and NUMA nodes it is bound to, and the memory of its process."""
