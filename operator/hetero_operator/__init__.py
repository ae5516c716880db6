"""The Kubernetes operator's home. This version has none yet: see the README's state of things.

The package stands here so that its border is held from the first line on: it may depend on `hetero_api` only.
"""
