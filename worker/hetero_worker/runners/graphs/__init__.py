"""Graphs of steps that only decode: captured in pieces where the step meets other ranks on the host."""
