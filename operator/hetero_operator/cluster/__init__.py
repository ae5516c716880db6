"""All that talks to the Kubernetes API, and nothing else does.

transport (one HTTP session) ◄ discovery, reflector ► store; lookups, executor, status_writer, recorder.

Reads fill stores, in which the reconciler looks; writes go through the fence, which opens only while the Lease is held.
"""
