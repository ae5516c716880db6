"""The Kubernetes operator: makes a group of ranks and a gateway of every HeteroInference, and tells how it stands.

main ─► workers ─► reconciler ─► reconcile (pure: what to do, what to tell), cluster (all that talks to the API)
     ─► election, kopf_session ─► handlers, health, metrics

It depends on `hetero_api` only, of this project.
"""
