"""The words of spec.placement that placement itself knows: no pydantic, so that it is arithmetic on any machine."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

SHARE_KINDS: Final = ("attention", "mlp", "vocabulary")


class PlacementMode(StrEnum):
    """Way to spread a model over ranks."""

    AUTO = "Auto"
    TENSOR = "Tensor"
    LAYER = "Layer"
    GPU_ONLY = "GpuOnly"
