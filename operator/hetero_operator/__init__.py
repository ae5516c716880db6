"""The Kubernetes operator: makes a group of ranks and a gateway of every HeteroInference, and reports its status.

main ─► workers ─► reconciler ─► reconcile (pure: plans and reports), cluster (every call of the API)
     ─► election, kopf_watch, monitoring

Of this project, it depends on `hetero_api` only.
"""
