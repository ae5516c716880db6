"""Adapters of a group: what is loaded, and what requests may ask for."""
