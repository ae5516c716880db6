"""Checks of `hetero doctor`: what a machine or a cluster lacks for serving, what that costs, and the fix.

Snapshots (`machine`, `software`, `cluster`) read; checks are pure functions of a snapshot.
"""
