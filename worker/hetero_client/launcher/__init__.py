"""Runs a HeteroInference on this machine: gateway and ranks as supervised processes."""
