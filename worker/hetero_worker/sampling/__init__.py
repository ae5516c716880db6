"""Sampling from logits that stay on the ranks that computed them. Pure functions; no exchange between ranks."""
