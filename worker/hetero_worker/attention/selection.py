"""Which attention a rank computes with: what its platform names, for its arithmetic type."""

from __future__ import annotations

import torch

from hetero_worker.attention.base import AttentionBackend
from hetero_worker.attention.device_paged import DevicePagedAttention
from hetero_worker.attention.paged import paged_attention
from hetero_worker.platforms.base import AttentionKind, Platform


def attention_of(platform: Platform, dtype: torch.dtype) -> AttentionBackend:
    """A new backend, for one model."""
    match platform.attention:
        case AttentionKind.HOST:
            return paged_attention(dtype)
        case AttentionKind.DEVICE:
            return DevicePagedAttention(platform.device)
