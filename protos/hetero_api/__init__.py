"""The contract of HeteroInference: protobuf messages, the typed custom resource, shard plans and names.

Operator, gateway, worker and client depend on this package; it depends on none of them, and on no torch.
"""

from hetero_api.contract import VERSION as __version__

__all__ = ["__version__"]
