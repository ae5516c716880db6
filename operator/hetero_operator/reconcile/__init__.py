"""Decisions about one HeteroInference: pure functions from an observation to a plan and a report.

    plan(observed)                  → Plan     what to apply and delete
    report(observed, plan, outcome) → Report   the status, Events, and when to look again

Nothing here talks to a cluster, reads a clock or the environment, or imports kopf or a client: the import rules hold
that. Objects of Kubernetes are plain decoded JSON. The same input gives the same output, byte for byte.
"""
