"""Device backends: what a rank computes on. `base` is the interface, `cpu` and `cuda` implement it."""
