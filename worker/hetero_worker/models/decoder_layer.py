"""One decoder layer's part on one rank: a holder has the residual stream, a helper has none (`lending`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan, UnitRange
from hetero_worker.adapters.peft_files import Targets
from hetero_worker.attention.base import StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.distributed.exchange import SumExchange
from hetero_worker.layers.blocks import Attention, GatedMlp, SelfAttention, layer_norm, mlp_norm
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.latent_attention import LatentAttention
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.moe import ExpertMlp
from hetero_worker.layers.norm import ResidualStream, RmsNorm
from hetero_worker.layers.rotary import Rotation
from hetero_worker.memory.streams import HOST
from hetero_worker.models.delta_attention import DeltaAttention
from hetero_worker.models.layer_inputs import LayerInput
from hetero_worker.models.lending import Lending
from hetero_worker.models.streaming import ExpertStream, StreamedMlp


class DecoderLayer:
    """Attention and MLP; either is None if the rank owns nothing of it.

    The partial sums of attention are added among the holders, the ranks that own heads, in one round. So are those of
    the MLP; the leader's part includes its helpers'. One rank needs no round. Some models norm the sums: then all
    holders do so, since each has the residual stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: ShardPlan,
        *,
        layer: int,
        rank: int,
        ops: FusedOps = PLAIN_OPS,
        late_experts: int = 0,
        streams: bool = False,
    ) -> None:
        """`late_experts`: number of a token's chosen experts whose sum a helper returns with the next layer's.

        `streams`: this rank may compute all experts of a step, those of helpers too (`StreamedMlp`).
        """
        shard = plan.ranks[rank].layers[layer]
        self._late_experts = late_experts
        self._ops = ops
        self._attention_owners = plan.attention_owners(layer)
        mlp_owners = plan.mlp_owners(layer)
        self._mlp_contributors = _contributors(self._attention_owners, {*mlp_owners, *plan.expert_owners(layer)})
        self.attention: Attention | None = None
        self.mlp: GatedMlp | ExpertMlp | None = None
        if shard.kv_heads.size:
            first = self._attention_owners[0] == rank
            self.attention = self_attention(config, layer, shard.kv_heads, adds_bias=first, ops=ops)
        norm, shared = mlp_norm(config, layer, ops), None
        if shard.mlp_columns.size:
            first = mlp_owners[0] == rank
            self.mlp = shared = GatedMlp(config, layer, shard.mlp_columns, adds_bias=first, norm=norm, ops=ops)
        if shard.experts.size:
            columns = shard.expert_columns if shard.expert_columns.size else None
            own = plan.experts_of(rank, layer)
            self.mlp = ExpertMlp(
                config, layer, own, norm=norm, columns=columns, shared=shared, ops=ops, late=late_experts
            )
        self._streamed: StreamedMlp | None = None
        if streams and layer in config.expert_layers:
            self._streamed = StreamedMlp(config, layer, self.mlp, norm=norm, ops=ops)
        self._sum_norms: tuple[RmsNorm, ...] = ()
        self._norms_apart: tuple[RmsNorm, ...] = ()
        if shard.kv_heads.size:
            self._sum_norms = tuple(layer_norm(config, layer, name, ops) for name in config.norms.sums)
            if config.experts is not None and config.experts.norms is not None and layer in config.expert_layers:
                names = config.experts.norms.shared_sum, config.experts.norms.experts_sum
                self._norms_apart = tuple(layer_norm(config, layer, name, ops) for name in names)
        self._input: LayerInput | None = None
        if shard.kv_heads.size and config.layer_input_size:
            self._input = LayerInput(config, layer, ops)
        self._is_dense = layer not in config.expert_layers
        self._experts_adapt = takes_adapters(config)
        self._mlp_sum_width = config.mlp_sum_width
        self._scalar_source = TensorSlice(f"model.layers.{layer}.layer_scalar", (1,)) if config.layer_scalars else None
        self._scalar = 1.0

    @property
    def parts(self) -> tuple[Attention | GatedMlp | ExpertMlp, ...]:
        """Parts of the layer that the rank owns."""
        return tuple(part for part in (self.attention, self.mlp) if part is not None)

    @property
    def _weighted(self) -> tuple[Attention | GatedMlp | ExpertMlp | StreamedMlp | LayerInput, ...]:
        beside = self._streamed, self._input
        return (*self.parts, *(part for part in beside if part is not None))

    @property
    def adaptable(self) -> tuple[ShardedLinear, ...]:
        """Linear layers that take adapters: of usual attention and of a dense MLP."""
        attention = self.attention.linears if isinstance(self.attention, SelfAttention) else ()
        mlp = self.mlp.linears if isinstance(self.mlp, GatedMlp) and self._is_dense else ()
        return (*attention, *mlp)

    @property
    def experts(self) -> ExpertMlp | None:
        """The rank's experts of the layer, if they take adapters: see `takes_adapters`."""
        return self.mlp if isinstance(self.mlp, ExpertMlp) and self._experts_adapt else None

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for layers whose steps take the same memory."""
        window = self.attention.window if self.attention is not None else None
        return window, self._late_experts, *((type(part), part.linear_shapes) for part in self.parts)

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take; `kernel` None: in the arithmetic type."""
        parts = sum(part.weight_bytes(dtype, kernel) for part in self._weighted)
        return parts + sum(norm.weight_bytes(dtype) for norm in (*self._sum_norms, *self._norms_apart))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        return [tensor for part in (*self._weighted, *self._sum_norms, *self._norms_apart) for tensor in part.tensors]

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read the rank's slices. Raises ModelError."""
        for part in self._weighted:
            part.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        for norm in (*self._sum_norms, *self._norms_apart):
            norm.load(checkpoint, dtype=dtype, device=device)
        if self._scalar_source is not None and self.attention is not None:
            scalar = torch.empty(1)
            checkpoint.read(self._scalar_source, scalar)
            self._scalar = scalar.item()

    def __call__(
        self,
        stream: ResidualStream,
        rotation: Rotation,
        *,
        attention: StepAttention,
        cache: LayerCache | None,
        exchange: SumExchange,
        lending: Lending | None = None,
        inputs: torch.Tensor | None = None,
        experts: ExpertStream | None = None,
    ) -> None:
        """Add the layer's two halves to the residual stream, on a holder. The next norm adds the second half.

        `exchange` is that of the layer's holders; `lending` is the leader's end if it has helpers, else None. `inputs`
        [tokens, layers · layer_input_size] are those that layers have of their own. `experts`: helpers' come in this
        step, and helpers do nothing in layers that have some.
        """
        partial = None
        if self.attention is not None and cache is not None:
            partial = self.attention.of_stream(
                stream, rotation, attention, cache, lambda part: self._sum(part, self._attention_owners, exchange)
            )
        self._add(stream, partial, 0, self._attention_owners, exchange)
        if experts is not None and self._streamed is not None:
            partial = self._streamed(stream.settle(), experts)
        elif lending is not None:
            partial = lending.sum(stream.settle(), self.mlp, has_experts=not self._is_dense)
        else:
            partial = self.mlp.of_stream(stream) if self.mlp is not None else None
        self._add(stream, partial, 1, self._mlp_contributors, exchange)
        if self._input is not None and inputs is not None:
            stream.add(self._input(stream.settle(), inputs))
        if self._scalar != 1.0:
            stream.scale(self._scalar)

    def _add(
        self,
        stream: ResidualStream,
        partial: torch.Tensor | None,
        half: int,
        owners: Sequence[int],
        exchange: SumExchange,
    ) -> None:
        """Add the sum of the owners' partials of a half to the stream, normed if the model does so."""
        if partial is None:
            hidden = stream.settle()
            width = self._mlp_sum_width if half else hidden.shape[1]
            partial = self._ops.empty(len(hidden), width, dtype=hidden.dtype, device=hidden.device)
        self._sum(partial, owners, exchange)
        joined = self._joined(partial, stream.settle().shape[1])
        stream.add(self._sum_norms[half](joined) if self._sum_norms else joined)

    def _joined(self, total: torch.Tensor, hidden_size: int) -> torch.Tensor:
        """Return [tokens, hidden] of a half's sum over ranks; experts that add up apart have norms of their own."""
        if total.shape[1] == hidden_size:
            return total
        of_all, of_experts = self._ops.halves(total)
        if not self._norms_apart:
            return of_all
        first, second = self._norms_apart
        joined = first(of_all)
        self._ops.add(joined, second(of_experts))
        return joined

    def _sum(self, partial: torch.Tensor, owners: Sequence[int], exchange: SumExchange) -> None:
        if exchange.world_size > 1:
            exchange.all_reduce(partial, owners)

    def help(self, like: torch.Tensor, lending: Lending) -> None:
        """Compute a helper's part of the MLP of rows that the leader lends; `like` [tokens, hidden] has their shape.

        Raises ValueError on a rank that owns nothing of the layer.
        """
        if self.mlp is None:
            raise ValueError("a rank that owns nothing of a layer cannot help with it")
        in_two = self.mlp.in_two if self._late_experts and isinstance(self.mlp, ExpertMlp) else None
        lending.help(like, self.mlp, in_two, has_experts=not self._is_dense)


def self_attention(
    config: ModelConfig, layer: int, heads: UnitRange, *, adds_bias: bool, ops: FusedOps = PLAIN_OPS
) -> Attention:
    """Return the attention of a layer's KV heads `heads`, or what the layer has in its place."""
    if layer in config.delta_layers:
        return DeltaAttention(config, layer, heads, ops=ops)
    kind = SelfAttention if config.latent is None else LatentAttention
    return kind(config, layer, heads, adds_bias=adds_bias, ops=ops)


def takes_adapters(config: ModelConfig) -> bool:
    """Return whether the model's experts may take adapters: those that are named one by one, and have no biases."""
    experts = config.experts
    return experts is not None and not (experts.names.stacked or experts.biased or experts.norms is not None)


def adapter_targets(config: ModelConfig, *, experts: bool = False) -> Targets:
    """Return the modules that take adapters, with the shapes of their weights: the same on every rank.

    They are the projections of usual attention, of dense MLPs, and with `experts` of experts. Experts of all tokens,
    routers, latent attention, the gated delta rule, the vocabulary and norms take none.
    """
    found: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        attention = self_attention(config, layer, UnitRange(0, config.num_kv_heads), adds_bias=False)
        linears = list(attention.linears) if isinstance(attention, SelfAttention) else []
        if layer not in config.expert_layers:
            linears += GatedMlp(config, layer, UnitRange(0, config.mlp_columns(layer)), adds_bias=False).linears
        elif experts and config.experts is not None and takes_adapters(config):
            own = ExpertMlp(config, layer, range(config.experts.number), norm=mlp_norm(config, layer, PLAIN_OPS))
            linears += own.linears
        for part in (part for linear in linears for part in linear.slices):
            found[part.name.removesuffix(".weight")] = part.full_shape[0], part.full_shape[1]
    return found


def _contributors(holders: Sequence[int], mlp_owners: Collection[int]) -> tuple[int, ...]:
    """Return the holders with a part of the MLP's sum: its owners, and the leader if it has helpers."""
    is_helped = any(rank not in holders for rank in mlp_owners)
    return tuple(rank for rank in holders if rank in mlp_owners or (is_helped and rank == holders[0]))
