"""Experts that ranks on host cores hold, computed by their group's GPU rank for the prompts of a step.

Of many rows it takes less time to copy a layer's experts to the device, as narrow as they are kept, than to compute
them on host cores. The GPU rank maps the arenas of the others (`memory.panels`), has its driver pin them, and copies
layer after layer into two buffers in turn: the copies of the next layer run beside the computing of this one. All of it
is in one order, which events keep: a buffer is filled only after the layer that it held was computed.

The other ranks do nothing in such layers; all ranks learn from the step's plan that it is such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.layers.blocks import GatedMlp
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear_kernels import LinearKernel, PanelExperts
from hetero_worker.layers.moe import ExpertMlp, Router
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.memory.budget import mib
from hetero_worker.memory.panels import PanelLayer
from hetero_worker.memory.streams import HOST, PAST, DeviceStreams, Moment, Way

_ALIGNMENT: Final = 256
"""Bytes, in a buffer."""

MakePanelExperts = Callable[[PanelLayer, torch.Tensor], PanelExperts]
"""Makes experts of a layer in a buffer on the device."""


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """All experts of one rank on host cores."""

    rank: int
    memory: torch.Tensor
    """uint8, mapped here: the rank's arena."""
    layers: Mapping[int, PanelLayer]


@dataclass(slots=True)
class _Streamed:
    """A layer: what is copied for it, and what computes it then."""

    copies: list[tuple[torch.Tensor, torch.Tensor]]
    experts: dict[int, PanelExperts]
    """By the rank that holds them."""
    copied: Moment = PAST


class ExpertStream:
    """The GPU rank's end: two buffers, and copies into them. One thread calls."""

    def __init__(self, streams: DeviceStreams, device: torch.device, *, buffer_bytes: int) -> None:
        """`buffer_bytes`: of both buffers together, which are allocated by `link`."""
        self._streams = streams
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._layers: dict[int, _Streamed] = {}
        self._order: list[int] = []
        self._pinned: list[torch.Tensor] = []

    @property
    def layers(self) -> Sequence[int]:
        """Layers whose experts are streamed, ascending; none before `link`."""
        return self._order

    def link(self, ranks: Sequence[SharedExperts], make: MakePanelExperts) -> None:
        """Take what the ranks hold, and make the buffers; `pin` each layer then.

        Raises MemoryBudgetError if a layer is larger than a buffer.
        """
        self.unlink()
        sizes = {layer: 0 for shared in ranks for layer in shared.layers}
        places: dict[int, list[tuple[SharedExperts, int]]] = {layer: [] for layer in sizes}
        for shared in ranks:
            for layer, held in shared.layers.items():
                places[layer].append((shared, sizes[layer]))
                sizes[layer] += -(-held.num_bytes // _ALIGNMENT) * _ALIGNMENT
        largest = max(sizes.values())
        if 2 * largest > self._buffer_bytes:
            raise MemoryBudgetError(
                f"two buffers of a layer's {mib(largest)} of experts are more than the {mib(self._buffer_bytes)} that "
                "are kept for them; set spec.engine.expertStreaming: 0"
            )
        buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._order = sorted(sizes)
        for number, layer in enumerate(self._order):
            streamed, buffer = _Streamed([], {}), buffers[number % 2]
            for shared, begin in places[layer]:
                held = shared.layers[layer]
                streamed.copies.append((shared.memory[held.begin : held.end], buffer[begin : begin + held.num_bytes]))
                streamed.experts[shared.rank] = make(held.moved(begin), buffer)
            self._layers[layer] = streamed

    def pin(self, layer: int) -> None:
        """Have the driver pin the ranks' experts of a layer, which takes seconds for gigabytes.

        Raises MemoryBudgetError if it cannot.
        """
        for memory, _ in self._layers[layer].copies if layer in self._layers else ():
            if problem := self._streams.pin(memory.data_ptr(), memory.nbytes):
                raise MemoryBudgetError(
                    f"{mib(memory.nbytes)} of experts of layer {layer} cannot be pinned: {problem}; raise the limit of "
                    "locked memory, or set spec.engine.expertStreaming: 0"
                )
            self._pinned.append(memory)

    def unlink(self) -> None:
        """Let go of the ranks' memory and of the buffers. Idempotent."""
        self._streams.settle()
        self._layers, self._order = {}, []
        while self._pinned:
            self._streams.unpin(self._pinned.pop().data_ptr())

    def begin(self) -> None:
        """Begin a step: copy the first two layers."""
        now = self._streams.now()
        for layer in self._order[:2]:
            self._start(layer, now)

    def take(self, layer: int) -> Sequence[PanelExperts]:
        """Return a layer's experts; the device computes what follows when they are there."""
        streamed = self._layers[layer]
        self._streams.compute_after(streamed.copied)
        return list(streamed.experts.values())

    def finish(self, layer: int) -> None:
        """Note that all of the layer's work was given to the device; copy the layer after the next behind it."""
        following = self._order.index(layer) + 2
        if following < len(self._order):
            self._start(self._order[following], self._streams.now())

    def rename(self, rank: int, layer: int, leaving: int, arriving: int) -> None:
        """Take an expert of a rank to be in the place of another from now on."""
        if layer in self._layers:
            self._layers[layer].experts[rank].rename(leaving, arriving)

    def _start(self, layer: int, after: Moment) -> None:
        streamed = self._layers[layer]
        streamed.copied = self._streams.copy(Way.IN, streamed.copies, after=after)


class StreamedMlp:
    """The other half of a layer with experts, all of which this rank computes: its own, and streamed ones."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        own: ExpertMlp | GatedMlp | None,
        *,
        norm: RmsNorm,
        ops: FusedOps = PLAIN_OPS,
    ) -> None:
        """`own`: this rank's part of the MLP, with the same `norm`."""
        assert config.experts is not None, "plans stream experts of models that have some"
        self._layer = layer
        self._own = own
        self._norm = norm
        prefix = config.experts.names.block_of(layer)
        self._router = (
            own.router
            if isinstance(own, ExpertMlp)
            else Router(config.experts, prefix, config.hidden_size, norm, ops=ops)
        )

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:  # noqa: ARG002
        """Return the most bytes of the weights that `own` has not."""
        router = 0 if isinstance(self._own, ExpertMlp) else self._router.weight_bytes
        return router + (self._norm.weight_bytes(dtype) if self._own is None else 0)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights that `own` has not."""
        router = () if isinstance(self._own, ExpertMlp) else self._router.tensors
        return (*self._norm.tensors, *router) if self._own is None else router

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        kernel: LinearKernel,  # noqa: ARG002 - as of all parts of a layer
        device: torch.device = HOST,
    ) -> None:
        """Read what `own`, which is loaded, has not. Raises ModelError."""
        if self._own is None:
            self._norm.load(checkpoint, dtype=dtype, device=device)
        if not isinstance(self._own, ExpertMlp):
            self._router.load(checkpoint, device)

    def __call__(self, hidden: torch.Tensor, stream: ExpertStream) -> torch.Tensor:
        """Return the sum [tokens, hidden] of all experts, of hidden states [tokens, hidden]."""
        normed, own = self._norm(hidden), self._own
        if isinstance(own, ExpertMlp):
            chosen, shares = own.choices(hidden)
            total = own.of_choices(normed, chosen, shares)
        else:
            chosen, shares = self._router(hidden)
            total = torch.zeros_like(hidden) if own is None else own.of_normed(normed)
        for experts in stream.take(self._layer):
            experts.add(total, normed, chosen, shares)
        stream.finish(self._layer)
        return total
