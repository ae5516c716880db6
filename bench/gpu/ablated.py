"""A GPU's backend with some of its own kernels turned off, to see what they gain."""

from __future__ import annotations

from bench.gpu.orders import Options
from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import AttentionBackend
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps


class AblatedBackend(CudaBackend):
    """The first CUDA device, by torch's operators where `options` turn ours off."""

    def __init__(self) -> None:
        super().__init__(0, pool="bench")
        self.options = Options()

    def attention(self, config: ModelConfig, *, batch_invariant: bool) -> AttentionBackend:
        """Return ours, or torch's if that is asked for."""
        if self.options.own_attention:
            return super().attention(config, batch_invariant=batch_invariant)
        return TorchPagedAttention(self.device, batch_invariant=batch_invariant, reason="plain operators are asked for")

    def fused_ops(self, *, batch_invariant: bool) -> FusedOps:
        """Return ours, or torch's if that is asked for."""
        return super().fused_ops(batch_invariant=batch_invariant) if self.options.fused else PLAIN_OPS
