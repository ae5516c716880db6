"""Sharded layers. Each carries its own loading rule."""
