"""Which attention a rank computes with: what suits its platform, its arithmetic type and its model.

On a GPU that is our kernels, `TritonPagedAttention`, wherever Triton is and the kernels have the model's shapes, and
`DevicePagedAttention` otherwise, which takes any shape. torch's `VarlenAttention` and these can also be asked for by
name, to be compared. FlashInfer would be another: its plan for a step is made on the host by code that is compiled for
every shape, and whether that pays beside kernels of ours has to be measured on a GPU before anything depends on it.

On host cores that have the native kernels it is `NativePagedAttention`, in float32; else torch's operators.

Batch-invariant attention is one kernel of ours on a GPU, and `RowAttention` on tensors of the host, unless they have
the native kernels, which are invariant anyhow.

The choice is made once, at construction, and told: a backend never becomes another on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import AttentionBackend, AttentionRule
from hetero_worker.attention.device_paged import DevicePagedAttention
from hetero_worker.attention.kernel_limits import refusal
from hetero_worker.attention.native_paged import NativePagedAttention
from hetero_worker.attention.paged import paged_attention
from hetero_worker.attention.rows import RowAttention
from hetero_worker.attention.varlen import VarlenAttention, varlen_attend, varlen_refusal
from hetero_worker.kernels.availability import triton_problem
from hetero_worker.native.issuing import Issuer
from hetero_worker.platforms.base import HOST, AttentionKind, Platform


class DeviceAttention(StrEnum):
    """Backends of a GPU, to be asked for by name."""

    TRITON = "triton"
    VARLEN = "varlen"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A new backend, for one model."""

    backend: AttentionBackend
    reason: str = ""
    """Why not a faster one, for reports; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.reason})" if self.reason else self.backend.name


def choose_attention(
    platform: Platform,
    dtype: torch.dtype,
    config: ModelConfig,
    *,
    wanted: DeviceAttention | None = None,
    batch_invariant: bool = False,
    issuer: Issuer | None = None,
    no_issuer: str = "",
) -> ChosenAttention:
    """`wanted`, or else the best there is. `batch_invariant`: a row's bits do not depend on what else is in the batch.

    `issuer`: of the native kernels, on host cores; `no_issuer`: why there is none, where there could be.
    Raises ModelError when what is wanted is not to be had here: hosts have attention of their own only, and devices
    that are no CUDA devices that of plain operators.
    """
    device = platform.device
    if platform.attention == AttentionKind.HOST and wanted is not None:
        raise ModelError(f"attention by {wanted} is asked for on host cores, which have attention of their own only")
    if platform.attention == AttentionKind.HOST and issuer is not None and dtype == torch.float32:
        return ChosenAttention(NativePagedAttention(issuer))
    reason = no_issuer if issuer is None else f"the native kernels do not compute in {dtype}"
    if batch_invariant and wanted is None and device.type == HOST.type:
        return ChosenAttention(RowAttention(), reason)
    if platform.attention == AttentionKind.HOST:
        return ChosenAttention(paged_attention(dtype), reason)
    if wanted == DeviceAttention.VARLEN:
        return _varlen(device, dtype, config, batch_invariant=batch_invariant)
    refused = "plain operators are asked for" if wanted == DeviceAttention.PLAIN else _triton_refusal(device, config)
    if refused is None:
        return ChosenAttention(_triton(device, config, batch_invariant=batch_invariant))
    if wanted == DeviceAttention.TRITON or batch_invariant:
        why = " (engine.batchInvariant)" if batch_invariant else ""
        raise ModelError(f"attention by our kernels is asked for{why}, but {refused}")
    return ChosenAttention(DevicePagedAttention(device), refused if device.type == "cuda" else "")


def _triton_refusal(device: torch.device, config: ModelConfig) -> str | None:
    return triton_problem(device) or refusal(head_dim=config.head_dim, group_size=config.group_size)


def _triton(device: torch.device, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:
    from hetero_worker.attention.triton_paged import TritonPagedAttention  # imports triton

    return TritonPagedAttention(
        device, head_dim=config.head_dim, group_size=config.group_size, batch_invariant=batch_invariant
    )


def _varlen(device: torch.device, dtype: torch.dtype, config: ModelConfig, *, batch_invariant: bool) -> ChosenAttention:
    rules = [AttentionRule(config.attention_scale, window, config.attention_soft_cap) for window in set(config.windows)]
    if (reason := varlen_refusal(device, dtype, rules)) is not None:
        raise ModelError(f"attention by varlen_attn is asked for, but {reason}")
    attend = varlen_attend()
    assert attend is not None
    return ChosenAttention(VarlenAttention(device, attend, batch_invariant=batch_invariant))
