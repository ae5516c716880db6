"""Memory of graphs of steps on a GPU: which steps have graphs, and a bound of their bytes.

A rank settles its KV cache before it records a graph, so room for graphs is kept beforehand, by this estimate. It is
reported beside what they took in the end (RankStatus.graph_bytes), and consists of

- a place for the activations of the largest step, which all graphs share, for they never run at the same time,
- what the passes that prepare graphs leave on the stream where they are made: as much again, and libraries' workspaces,
- the results: the hidden states that each graph ends with, which are its own; the head comes behind graphs,
- what the driver keeps of each kernel of each graph, which grows with layers and sizes,
- and, where ranks on host cores take part, what is handed to them or comes from them: it has a place of its own in
  every graph, for the host reads and writes it between a graph's pieces.

The driver's share is what others measured: 64 KiB a kernel, by torch's documentation of CUDA graph trees up to CUDA
12.4 and driver 550, after which it is less; and 63 MiB more for 1,000 kernels more by topic 244901 of NVIDIA's forum.
Users of vLLM report 26 MiB a whole graph (its pull request 22897), 0.2 GiB for 35 graphs of 16 layers (11349), and 0.5
to 1 GiB for 35 to 67 of 32 layers; by this bound a graph of 32 layers takes 28 MiB, and 35 of them 1 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero_api.rank_memory import ModelMemory
from hetero_api.sharding import RankShard

MAX_ROWS: Final = 256
"""A step of more sequences computes long enough that launching its kernels one by one does not matter."""
MAX_MIXED_ROWS: Final = 64
"""Largest size where ranks on host cores take part: they take longer, and every graph keeps what they exchange."""
_FIRST: Final = (1, 2, 4)
_APART: Final = 8

KERNEL_BYTES: Final = 64 * 1024
"""Bytes that the driver keeps of a kernel, see the module."""
_LAYER_KERNELS: Final = 14
"""A layer's: 9 launches, each of its 4 products in two where it is cut along what is summed, and attention likewise."""
_STEP_KERNELS: Final = 12
"""Beside its layers': embedding, rotations, the last addition, the choice of rows."""
_ADAPTER_KERNELS: Final = 8
"""Of a layer, in graphs of steps with rows of adapters: two for each of its products."""
_ENDS: Final = 2
"""Bytes of pieces, in a layer where a graph is cut: each is a graph of its own, and costs about a kernel more."""
_EXCHANGED: Final = 2
"""Tensors of a layer that are summed over the host."""
_SEGMENT_BYTES: Final = 32 * 1024**2
"""By which the place of activations is larger than they are: memory is taken from the driver in pieces of 2 and 20
MiB."""
_LIBRARY_BYTES: Final = 64 * 1024**2
"""Bytes of a stream: the workspaces of cuBLAS and cuBLASLt, 32 MiB each on compute capability 9."""


def graph_sizes(max_num_seqs: int, *, most: int = MAX_ROWS) -> tuple[int, ...]:
    """Rows that steps which only decode are padded to, ascending; the last is the largest such step, or `most`."""
    largest = min(max_num_seqs, most)
    usual = (*_FIRST, *range(_APART, largest, _APART))
    return (*(size for size in usual if size < largest), largest)


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Bytes that are kept for the graphs of one rank."""

    activations: int = 0
    """The place that all graphs share."""
    preparation: int = 0
    """Bytes of the stream where graphs are made."""
    results: int = 0
    driver: int = 0
    exchanged: int = 0
    """Bytes of what crosses the host."""

    @property
    def computing(self) -> int:
        """Bytes that grow with the units that a rank owns of a layer."""
        return self.activations + self.preparation

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.computing + self.results + self.driver + self.exchanged

    @classmethod
    def of(
        cls,
        memory: ModelMemory,
        shard: RankShard,
        sizes: tuple[int, ...],
        *,
        num_host_ranks: int,
        has_adapters: bool = False,
    ) -> GraphMemory:
        """For graphs of these sizes, ascending. `num_host_ranks`: on host cores, that take part.

        `has_adapters`: adapters may be loaded; each size then has a second graph, of steps with rows of theirs.
        """
        if not sizes:
            return cls()
        layers = sum(not layer.is_empty for layer in shard.layers)
        kernels = layers * (_LAYER_KERNELS + (_ENDS * _EXCHANGED if num_host_ranks else 0)) + _STEP_KERNELS
        row_bytes = memory.config.hidden_size * memory.element_bytes
        exchanged = layers * (_EXCHANGED + num_host_ranks) * row_bytes if num_host_ranks else 0
        exchanged += memory.config.layer_inputs_width * memory.element_bytes if num_host_ranks else 0
        place = memory.decode_bytes(shard, sizes[-1]) + _SEGMENT_BYTES
        graphs = 2 if has_adapters else 1
        kernels = graphs * kernels + (layers * _ADAPTER_KERNELS if has_adapters else 0)
        return cls(
            activations=place,
            preparation=place + _LIBRARY_BYTES,
            results=graphs * sum(sizes) * row_bytes,
            driver=len(sizes) * kernels * KERNEL_BYTES,
            exchanged=graphs * sum(sizes) * exchanged,
        )
