"""Choice of a rank's attention backend, by platform and model.

- Host cores with the native library use `NativePagedAttention`.
- A GPU uses `TritonPagedAttention` where Triton works and the kernels support the model's heads.
- Everything else uses `TorchPagedAttention`, the reference, and reports why.

Batch-invariant mode uses the same backends; on a GPU it requires Triton. The choice is made once, at construction, and
reported: a backend is never replaced later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import AttentionBackend
from hetero_worker.attention.native_paged import NativePagedAttention
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.backends.base import HOST, AttentionKind, Platform
from hetero_worker.kernels.availability import attention_problem, triton_problem
from hetero_worker.native.op_queue import OpQueue


class DeviceAttention(StrEnum):
    """Backends of a GPU that can be requested by name, for comparisons."""

    TRITON = "triton"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A new backend, for one model."""

    backend: AttentionBackend
    reason: str = ""
    """Why no faster backend was chosen, for reports; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.backend.name} ({self.reason})" if self.reason else self.backend.name


def choose_attention(
    platform: Platform,
    config: ModelConfig,
    *,
    wanted: DeviceAttention | None = None,
    batch_invariant: bool = False,
    op_queue: OpQueue | None = None,
    no_op_queue: str = "",
) -> ChosenAttention:
    """Return the `wanted` backend, or else the fastest.

    `batch_invariant`: a row's bits must not depend on the rest of the batch. `op_queue`: of the native kernels, on host
    cores; `no_op_queue`: why there is none. Raises ModelError if the wanted backend is not available here.
    """
    device = platform.device
    if platform.attention == AttentionKind.HOST:
        if wanted is not None:
            raise ModelError(
                f"attention by {wanted} is asked for on host cores, which have attention of their own only"
            )
        if op_queue is not None:
            return ChosenAttention(NativePagedAttention(op_queue))
        return ChosenAttention(TorchPagedAttention(batch_invariant=batch_invariant), no_op_queue)
    if batch_invariant and wanted is None and device.type == HOST.type:  # a GPU that is played by the host
        return ChosenAttention(TorchPagedAttention(batch_invariant=True))
    problem = "plain operators are asked for" if wanted == DeviceAttention.PLAIN else _triton_problem(device, config)
    if problem is None:
        return ChosenAttention(_triton(device, config, batch_invariant=batch_invariant))
    if wanted == DeviceAttention.TRITON or batch_invariant:
        why = " (engine.batchInvariant)" if batch_invariant else ""
        raise ModelError(f"attention by our kernels is asked for{why}, but {problem}")
    return ChosenAttention(TorchPagedAttention(device), problem if device.type == "cuda" else "")


def _triton_problem(device: torch.device, config: ModelConfig) -> str | None:
    return triton_problem(device) or attention_problem(head_dim=config.head_dim, group_size=config.group_size)


def _triton(device: torch.device, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:
    from hetero_worker.attention.triton_paged import TritonPagedAttention  # imports triton

    return TritonPagedAttention(
        device, head_dim=config.head_dim, group_size=config.group_size, batch_invariant=batch_invariant
    )
