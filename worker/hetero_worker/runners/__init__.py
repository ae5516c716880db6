"""Runners: a rank's share of a step, from the plan to the sampled tokens."""
