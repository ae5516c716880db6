"""MLP of experts on one rank, which computes its own experts for the tokens that are routed to them.

Every rank that owns experts of the layer routes all tokens by itself, so routing needs no exchange round. All ranks
choose alike by the rule of `kernels.expert_choice`, for the residual stream is equal on all ranks to the last bit.

A kernel may compute all experts together (`LinearKernel.join_experts`): on host cores that is one native operation.
Otherwise they are computed one by one.

A rank may hold slices of experts, some columns of each, instead of whole ones: then its sum is a part of every chosen
expert's. All of its experts of a layer are whole, or all are slices of the same columns.

Adapters may change experts. Their products are part of what a kernel computes together; one by one, experts have them
as other linear layers do.

A rank's experts may change between two steps (`read`, then `hold`); the router stays the same. Each rank counts the
tokens that chose its own experts, or slices; it has these numbers at hand, so counting costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hetero_api.errors import ModelError, PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import ExpertsConfig
from hetero_api.rank_memory import EXPERT_ROWS
from hetero_api.sharding import UnitRange
from hetero_worker.adapters.low_rank import AdapterRows
from hetero_worker.adapters.peft_files import LowRankFactors
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.kernels.expert_choice import RouterWeights
from hetero_worker.layers.blocks import GatedMlp, layer_norm
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear import ShardedLinear, expert_down_linear, expert_gate_up_linear, packed_mlp
from hetero_worker.layers.linear_kernels import (
    FLOAT_TYPES,
    LateSum,
    LinearKernel,
    PackedExperts,
    PackedMlp,
    PackedWeight,
)
from hetero_worker.layers.norm import ResidualStream, RmsNorm
from hetero_worker.memory.panels import ExpertArena, PanelLayer, Place
from hetero_worker.memory.streams import HOST


class ExpertMlp:
    """norm → router → each own expert's gated MLP on its tokens → their sum, weighted by the router."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        own: Collection[int],
        *,
        norm: RmsNorm,
        columns: UnitRange | None = None,
        shared: GatedMlp | None = None,
        make_router: MakeRouter | None = None,
        ops: FusedOps = PLAIN_OPS,
        late: int = 0,
    ) -> None:
        """`own` are the numbers of this rank's experts, at least one, in any order; `columns` what it holds of each.

        `columns` None: they are whole. `shared` is the rank's part of the expert of all tokens, with the same norm
        unless the model has another for experts. `late`: number of a token's choices, those with the least shares,
        whose sum `in_two` returns apart. Raises PlanError if the layer is dense.
        """
        if config.experts is None or layer not in config.experts.layers:
            raise PlanError(f"the plan deals experts of layer {layer}, which is dense")
        self._prefix = config.experts.names.block_of(layer)
        self._config = config
        self._shape = config.experts
        self._adds_apart = config.experts.norms is not None
        if config.experts.norms is not None:
            norm = layer_norm(config, layer, config.experts.norms.experts, ops)
        self._norm = norm
        self._columns = columns
        self._shared = shared
        self._ops = ops
        self._late = late
        make_router = make_router or partial(Router, ops=ops, by_share=bool(late))
        self._router = make_router(config.experts, self._prefix, config.hidden_size, norm)
        self._device = HOST
        self._arena: ExpertArena | None = None
        self._arena_part = 0, 0
        self.slots: torch.Tensor | None = None
        """int64 [tokens]: the pass's places in the cache. On devices that pad steps, a row in place 0 has no expert."""
        self._counts = torch.zeros(config.experts.number, dtype=torch.int64)
        self._joined: PackedExperts | None = None
        self._adapter_rows: AdapterRows | None = None
        """Adapters of the layer's rows; None: experts take none."""
        self._own_rows = AdapterRows()
        """Adapters of the rows that one expert computes."""
        self._experts: dict[int, Expert] = {}
        self.hold({number: self._new_expert(number) for number in own})

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of this rank's experts, ascending."""
        return tuple(self._experts)

    @property
    def router(self) -> Router:
        """The layer's router."""
        return self._router

    def lie_in(self, arena: ExpertArena) -> None:
        """Load experts into an arena, which other ranks map. Call before `load`."""
        self._arena = arena

    def panels(self) -> PanelLayer:
        """Return where the loaded experts lie in their arena. Raises ModelError if their formats differ."""
        pairs = {number: (mlp.packed.gate_up, mlp.packed.down) for number, mlp in self._experts.items()}
        kinds = {(gate_up.panels, down.panels) for gate_up, down in pairs.values()}
        gate_up, down = next(iter(kinds))
        if len(kinds) != 1 or gate_up is None or down is None:
            raise ModelError(f"experts of {self._prefix} are stored in several formats")
        places = {number: (self._place(first), self._place(second)) for number, (first, second) in pairs.items()}
        return PanelLayer(*self._arena_part, gate_up, down, places)

    def _place(self, weight: PackedWeight) -> Place:
        assert self._arena is not None, "experts lie in an arena"
        return Place(*(part.data_ptr() - self._arena.address for part in weight.memory))

    @property
    def linears(self) -> list[ShardedLinear]:
        """Linear layers of this rank's experts."""
        return [linear for expert in self._experts.values() for linear in expert.linears]

    def take_adapters(self, rows: AdapterRows) -> None:
        """Let adapters change experts from now on; `rows`: those of the layer's rows."""
        self._adapter_rows, self._own_rows = rows, AdapterRows(rows.max_rank)

    def hold_adapter(
        self, number: int, factors: Sequence[Sequence[LowRankFactors | None]], kernel: LinearKernel, dtype: torch.dtype
    ) -> None:
        """Serve an adapter in place of another that had its number. `factors`: those of `linears`."""
        if self._joined is not None:
            pairs = zip(factors[::2], factors[1::2], strict=True)
            found = {expert: (*first, *second) for expert, (first, second) in zip(self._experts, pairs, strict=True)}
            changed = {at: each for at, each in found.items() if any(each)}
            self._joined.hold_adapter(number, changed, dtype, max_rank=self._own_rows.max_rank)
            return
        for linear, parts in zip(self.linears, factors, strict=True):
            if any(parts):
                linear.take_adapters(kernel, self._own_rows, device=self._device).hold(number, parts, dtype)
            else:
                linear.drop_adapter(number)

    def drop_adapter(self, number: int, dtype: torch.dtype) -> None:
        """Forget an adapter, which no row has any more."""
        if self._joined is not None:
            self._joined.hold_adapter(number, {}, dtype, max_rank=self._own_rows.max_rank)
        for linear in self.linears:
            linear.drop_adapter(number)

    @property
    def _numbers(self) -> torch.Tensor | None:
        """Numbers of the rows' adapters; None: no row has one that changes experts."""
        return None if self._adapter_rows is None else self._adapter_rows.numbers

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of an expert's linear layers, all experts being alike, and of the shared expert's."""
        return self._any_expert.linear_shapes + (self._shared.linear_shapes if self._shared is not None else ())

    def expert_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that a loaded expert takes; `kernel` None: in the arithmetic type."""
        return self._any_expert.weight_bytes(dtype, kernel)

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take."""
        experts = len(self._experts) * self.expert_bytes(dtype, kernel)
        shared = self._shared.linear_bytes(dtype, kernel) if self._shared is not None else 0
        if self._shared is not None and self._adds_apart:
            shared = self._shared.weight_bytes(dtype, kernel)
        return self._norm.weight_bytes(dtype) + self._router.weight_bytes + experts + shared

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        experts = (tensor for expert in self._experts.values() for tensor in expert.tensors)
        parts = (self._shared, self._norm) if self._adds_apart else (self._shared or self._norm,)
        normed = (tensor for part in parts if part is not None for tensor in part.tensors)
        return *normed, *self._router.tensors, *experts

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read the norm, the router and this rank's experts. Raises ModelError."""
        self._device = device
        if self._shared is not None:
            self._shared.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        if self._shared is None or self._adds_apart:
            self._norm.load(checkpoint, dtype=dtype, device=device)
        self._router.load(checkpoint, device)
        begin, sharing = 0, None
        if self._arena is not None:
            begin, sharing = self._arena.begin_part(), kernel.sharing(self._arena.allocate)
        for expert in self._experts.values():
            expert.load(checkpoint, dtype=dtype, kernel=sharing or kernel, device=device)
        if self._arena is not None:
            self._arena_part = begin, self._arena.num_bytes
        is_joined = not self._adds_apart and not self._shape.has_shared_gate
        shared = self._shared.packed if self._shared is not None and is_joined else None
        self._counts = torch.zeros(self._shape.number, dtype=torch.int64, device=device)
        loaded = [expert.packed for expert in self._experts.values()]
        self._joined = kernel.join_experts(
            self._shape, self._config.activation, shared=shared, counts=self._counts, loaded=loaded
        )
        if self._joined is None:
            self._counts = self._counts.cpu()
        self.hold(self._experts)

    def read(
        self, numbers: Collection[int], checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel
    ) -> dict[int, Expert]:
        """Return experts of these numbers for `hold`: those already held, and the others read. Changes nothing.

        Raises ModelError.
        """
        experts = {number: self._experts.get(number) or self._new_expert(number) for number in numbers}
        for number in set(numbers) - self._experts.keys():
            experts[number].load(checkpoint, dtype=dtype, kernel=kernel, device=self._device)
        return experts

    def hold(self, experts: Mapping[int, Expert]) -> None:
        """Compute these experts from now on, and reset the counts."""
        if self._arena is not None:
            self._move_in(experts)
        self._experts = dict(sorted(experts.items()))
        # One by one, an expert's tokens begin at its number's position and end at the next number's.
        self._bounds = torch.tensor([(number, number + 1) for number in self._experts], device=self._device)
        self._counts.zero_()
        self.rejoin()

    def _move_in(self, experts: Mapping[int, Expert]) -> None:
        """Have experts that arrive take the places of those that leave, in the memory that other ranks map."""
        leaving = sorted(self._experts.keys() - experts.keys())
        arriving = sorted(experts.keys() - self._experts.keys())
        for number, taken in zip(arriving, leaving, strict=False):
            own, place = experts[number].packed, self._experts[taken].packed
            own.gate_up.take_place_of(place.gate_up)
            own.down.take_place_of(place.down)

    def rejoin(self) -> None:
        """Compute with the held experts' weights where they lie now: those that slept lie elsewhere."""
        if self._joined is not None:
            self._joined.hold({number: expert.packed for number, expert in self._experts.items()})

    @property
    def is_joined(self) -> bool:
        """Whether a kernel computes all experts together: then no step waits for what rows have chosen."""
        return self._joined is not None

    def choices(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts' numbers and shares, [tokens, chosen] each."""
        # A step of which a rank gets slices is not padded.
        slots = self.slots if self.slots is not None and len(self.slots) == len(hidden) else None
        return self._router(hidden, slots)

    def take_counts(self) -> list[int]:
        """Return how many tokens chose each of the layer's experts since the last call; 0 for other ranks' experts."""
        counts: list[int] = self._counts.tolist()
        self._counts.zero_()
        return counts

    @property
    def _any_expert(self) -> Expert:
        return next(iter(self._experts.values()))

    def _new_expert(self, number: int) -> Expert:
        return Expert(self._config, self._shape, self._prefix, number, columns=self._columns, ops=self._ops)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of this rank's experts and its part of the shared one."""
        return self.of_stream(ResidualStream(hidden))

    def in_two(self, hidden: torch.Tensor) -> tuple[torch.Tensor, LateSum]:
        """Return the partial sum [tokens, hidden] without each token's `late` choices, and that of these.

        Raises ValueError if the model's experts add up apart: their sum is normed, and cannot come in two.
        """
        if self._adds_apart:
            raise ValueError("sums of experts that are normed do not come in two")
        normed = self._norm(hidden)
        chosen, shares = self.choices(hidden)
        if self._joined is None:
            return self._one_by_one_in_two(normed, chosen, shares)
        total, late = self._joined.in_two(normed, chosen, shares, late=self._late, numbers=self._numbers)
        if self._shared is not None and self._shape.has_shared_gate:
            self._ops.add(total, self._shared.of_normed(normed))
        return total, late

    def _one_by_one_in_two(
        self, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, LateSum]:
        early, late = slice(None, -self._late), slice(-self._late, None)
        numbers = self._numbers
        total = torch.zeros_like(normed) if self._shared is None else self._shared.of_normed(normed)
        self._add_one_by_one(total, normed, chosen[:, early], shares[:, early], numbers)

        def add_late() -> torch.Tensor:
            late_sum = torch.zeros_like(normed)
            self._add_one_by_one(late_sum, normed, chosen[:, late], shares[:, late], numbers)
            return late_sum

        return total, add_late

    def of_stream(self, stream: ResidualStream) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream.

        If experts add up apart, it is [tokens, 2 · hidden]: of the expert of all tokens, then of the others.
        """
        normed = stream.normed(self._norm)
        hidden = stream.settle()
        if self._adds_apart:
            return self._two_sums(normed, hidden)
        return self.of_choices(normed, *self.choices(hidden))

    def of_choices(self, normed: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of normed hidden states, whose experts are chosen.

        Only where experts do not add up apart.
        """
        if self._joined is None:
            total = torch.zeros_like(normed) if self._shared is None else self._shared.of_normed(normed)
            self._add_one_by_one(total, normed, chosen, shares, self._numbers)
            return total
        total = self._joined(normed, chosen, shares, self._numbers)
        if self._shared is not None and self._shape.has_shared_gate:
            self._ops.add(total, self._shared.of_normed(normed))
        return total

    def _two_sums(self, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return [tokens, 2 · hidden]: the partial sum of the expert of all tokens, then of the others."""
        of_all = None if self._shared is None else self._shared.apart(hidden)
        if self._joined is not None:
            return self._ops.beside(of_all, self._joined(normed, *self.choices(hidden)))
        of_experts = torch.zeros_like(hidden)
        self._add_one_by_one(of_experts, normed, *self.choices(hidden))
        return self._ops.beside(of_all, of_experts)

    def _add_one_by_one(
        self,
        total: torch.Tensor,
        normed: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        numbers: torch.Tensor | None = None,
    ) -> None:
        """Add this rank's experts to `total` [tokens, hidden], each for the tokens that chose it.

        `numbers`: those of the tokens' adapters, where some change experts.
        """
        for expert, rows, shares in self._assignments(chosen, weights):
            self._own_rows.begin(None if numbers is None else numbers[rows])
            result = expert(normed.index_select(0, rows))
            total.index_add_(0, rows, result.mul_(shares.to(result.dtype)))

    def _assignments(self, chosen: torch.Tensor, weights: torch.Tensor) -> Iterator[_Assignment]:
        """Yield the work of this rank's experts, by their numbers; experts that no token chose have none."""
        order = chosen.reshape(-1).argsort(stable=True)
        rows, shares = order // chosen.shape[1], weights.reshape(-1, 1)[order]
        bounds = torch.searchsorted(chosen.reshape(-1)[order], self._bounds).tolist()
        counts = self._counts.numpy()
        for (number, expert), (start, end) in zip(self._experts.items(), bounds, strict=True):
            counts[number] += end - start
            for begin in range(start, end, EXPERT_ROWS):
                part = slice(begin, min(begin + EXPERT_ROWS, end))
                yield _Assignment(expert, rows[part], shares[part])


class Expert:
    """One expert, or a slice of it: a gated MLP."""

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        block: str,
        number: int,
        *,
        columns: UnitRange | None = None,
        ops: FusedOps = PLAIN_OPS,
    ) -> None:
        """`block`: name of the layer's MLP; `columns` None: all of them."""
        self._activation = config.activation
        self._ops = ops
        self._gate_up = expert_gate_up_linear(config, experts, block, number, columns)
        self._down = expert_down_linear(config, experts, block, number, columns)

    @property
    def linears(self) -> tuple[ShardedLinear, ShardedLinear]:
        """Gate and up projections, and the down projection."""
        return self._gate_up, self._down

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of both linear layers."""
        return self._gate_up.shape, self._down.shape

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded expert takes; `kernel` None: in the arithmetic type."""
        return self._gate_up.weight_bytes(dtype, kernel) + self._down.weight_bytes(dtype, kernel)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        return *self._gate_up.tensors, *self._down.tensors

    @property
    def packed(self) -> PackedMlp:
        """The loaded weights."""
        return packed_mlp(self._gate_up, self._down)

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read the expert. Raises ModelError."""
        self._gate_up.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        self._down.load(checkpoint, dtype=dtype, kernel=kernel, device=device)

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden] of normed rows [rows, hidden]."""
        return self._down(self._gate_up.gated(normed, self._activation, self._ops))


class _Assignment(NamedTuple):
    """Rows that an expert computes at a time."""

    expert: Expert
    rows: torch.Tensor
    """int64 [rows]."""
    shares: torch.Tensor
    """float32 [rows, 1]: factors of the expert's result."""


class Router:
    """Choice of each token's experts. Its weights are as wide as they are stored."""

    def __init__(
        self,
        experts: ExpertsConfig,
        block: str,
        hidden_size: int,
        norm: RmsNorm,
        *,
        ops: FusedOps = PLAIN_OPS,
        by_share: bool = False,
    ) -> None:
        """`block`: name of the layer's MLP; `by_share`: as in `RouterWeights`."""
        self._by_share = by_share
        names, number = experts.names, experts.number
        self._ops = ops
        self._experts = experts
        self._norm = norm
        self._source = TensorSlice(f"{block}.{names.router}.weight", (number, hidden_size))
        self._addends: dict[str, TensorSlice] = {}
        if experts.routing.biased:
            self._addends["bias"] = TensorSlice(f"{block}.{names.router}.bias", (number,))
        if experts.routing.corrected:
            self._addends["correction"] = TensorSlice(f"{block}.{names.correction}", (number,))
        if experts.routing.scaled:
            self._addends["norm"] = TensorSlice(f"{block}.router.scale", (hidden_size,))
            self._addends["factors"] = TensorSlice(f"{block}.router.per_expert_scale", (number,))
        self._loaded: RouterWeights | None = None

    @property
    def weight_bytes(self) -> int:
        """Return the most bytes that the loaded weights take."""
        sources = (self._source, *self._addends.values())
        return sum(math.prod(source.shape) for source in sources) * torch.float32.itemsize

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        loaded = self._loaded
        found = () if loaded is None else (loaded.weight, loaded.bias, loaded.correction, loaded.factors)
        return tuple(tensor for tensor in found if tensor is not None)

    def load(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """Read the weights, after the norm is loaded. Raises ModelError."""
        stored = checkpoint.dtype_of(self._source)
        kept = stored if stored in FLOAT_TYPES.values() else torch.float32
        weight = torch.empty(self._source.shape, dtype=kept, device=device)
        checkpoint.read(self._source, weight)
        others = {}
        for name, source in self._addends.items():
            others[name] = torch.empty(source.shape, dtype=torch.float32, device=device)
            checkpoint.read(source, others[name])
        own = others.pop("norm", None)
        norm = self._norm.weight if own is None else (own.double() / math.sqrt(len(own))).float()
        self._loaded = RouterWeights(self._experts, weight, norm, self._norm.eps, **others, by_share=self._by_share)

    def __call__(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts' numbers, best first, and their weights, [tokens, chosen] each.

        `slots` as for `FusedOps.route`. Raises RuntimeError before weights are loaded.
        """
        if self._loaded is None:
            raise RuntimeError("a router was used before its weights were loaded")
        return self._ops.route(hidden, self._loaded, slots)


MakeRouter = Callable[[ExpertsConfig, str, int, RmsNorm], Router]
"""Makes a router of experts, the name of the layer's MLP, the hidden size and the norm before it."""
