"""Device backends: one object answers for all that depends on a rank's device. `base` is the interface, `cpu`, `cuda`
and `torch_reference` implement it."""
