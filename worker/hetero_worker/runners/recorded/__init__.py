"""Recorded steps of CPU ranks: a decode step becomes one native call, and several of them a run."""
