"""What computes a rank's share of a step, one runner a kind of device."""
