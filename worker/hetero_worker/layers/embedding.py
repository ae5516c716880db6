"""Token embedding, with rows sharded over the ranks, and the output head.

Rows are kept as narrow as they are stored or quantised, if the head's kernel can multiply with them so, and are widened
when they are looked up. A tied head with the same rows packs them from the embedding. If its kernel `embeds`, the
embedding looks rows up in the packed weight and keeps no other copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.quantized_matrix import QuantizedRows
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight, kept_format, matrix_bytes
from hetero_worker.layers.packing import floats_dtype, pack_in_place, pack_quantized, read_floats
from hetero_worker.memory.streams import HOST

EMBEDDING = "model.embed_tokens.weight"
OF_LAYERS = "model.embed_tokens_per_layer.weight"
HEAD = "lm_head.weight"
_COMPARED_ROWS = 8


class _FloatRows:
    """Rows of floats, in the arithmetic type or narrower."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        self._dtype = dtype

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return F.embedding(numbers, self.weight).to(self._dtype)


class ShardedEmbedding:
    """Lookup of the rows that this rank holds. Not usable before `load`."""

    def __init__(self, config: ModelConfig, rows: UnitRange, *, of_layers: bool = False) -> None:
        """`of_layers`: the embedding that tokens have for all layers, not the usual one."""
        name, width = (OF_LAYERS, config.layer_inputs_width) if of_layers else (EMBEDDING, config.hidden_size)
        self._source = _vocabulary_slice(config, name, rows, width)
        self._stored = config.weights
        self._rows = rows
        self._is_whole = rows.size == config.vocab_size
        self._scale = config.layer_input_size**0.5 if of_layers else config.embedding_scale
        self._scale_in_type = 1.0
        self._packed: PackedWeight | None = None
        self._table: _FloatRows | QuantizedRows | PackedWeight = _FloatRows(torch.empty(0), torch.float32)

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded rows take; `kernel` is the output head's, as for `load`."""
        stored = self._stored
        return matrix_bytes(self._shape, stored.vocabulary, stored.floats, dtype=dtype, kernel=kernel)

    @property
    def num_rows(self) -> int:
        """Number of rows on this rank."""
        return self._rows.size

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded rows, except memory of a kernel's own."""
        return (self._table.weight,) if isinstance(self._table, _FloatRows) else tuple(self._table.tensors)

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        kernel: LinearKernel | None = None,
        device: torch.device = HOST,
    ) -> None:
        """Read the rows in the form that the output head's `kernel` wants; None: in the arithmetic type.

        Raises ModelError.
        """
        # The scale is rounded to the weight's type, as the models were trained.
        self._scale_in_type = torch.tensor(self._scale, dtype=dtype).item()
        self._packed = None
        if kernel is not None and kernel.embeds:
            packed = self._packed_at_once(checkpoint, dtype=dtype, kernel=kernel)
            if packed is not None:
                self._table = self._packed = packed
                return
        if kept_format(checkpoint.format_of(self._source), kernel) is not None:
            self._table = QuantizedRows.of(checkpoint.read_quantized(self._source), dtype)
        else:
            kept = floats_dtype(checkpoint, [self._source], dtype, kernel)
            weight = torch.empty(self._shape, dtype=kept, device=device)
            read_floats(checkpoint, [self._source], weight)
            self._table = _FloatRows(weight, dtype)
        if kernel is not None and kernel.embeds:
            self.pack(kernel)

    def _packed_at_once(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel
    ) -> PackedWeight | None:
        """Pack straight from the checkpoint, without a second copy of the rows; None if that is not possible."""
        parts = [self._source]
        if kept_format(checkpoint.format_of(self._source), kernel) is None:
            return pack_in_place(checkpoint, parts, dtype=dtype, kernel=kernel)
        return pack_quantized(checkpoint, parts, kernel)

    def pack(self, kernel: LinearKernel) -> PackedWeight:
        """Return the rows packed for the kernel. If it `embeds`, rows are looked up in the packed weight from now on.

        Raises RuntimeError for a kernel that the rows were not loaded for.
        """
        if self._packed is not None:
            return self._packed
        match self._table:
            case QuantizedRows() if kernel.takes(self._table.format):
                packed = kernel.pack_quantized(self._table.matrix())
            case _FloatRows():
                packed = kernel.pack(self._table.weight)
            case _:
                raise RuntimeError("an embedding was packed by a kernel that it was not loaded for")
        if kernel.embeds:
            self._table = self._packed = packed
        return packed

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden] of int64 [tokens]; other ranks' rows are zero, so results add up."""
        scale = self._scale_in_type
        if isinstance(self._table, PackedWeight):
            return self._table.embed(token_ids, first=self._rows.begin, scale=scale)
        found = self._table.rows(token_ids) if self._is_whole else self._own(self._table, token_ids)
        return found if scale == 1.0 else found.mul_(scale)

    def _own(self, table: _FloatRows | QuantizedRows, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self._rows.begin
        foreign = (local < 0) | (local >= self._rows.size)
        found = table.rows(local.masked_fill_(foreign, 0))
        return found.masked_fill_(foreign.unsqueeze(-1), 0.0)

    @property
    def _shape(self) -> tuple[int, int]:
        return self._rows.size, self._source.full_shape[1]


class OutputHead:
    """Logits of this rank's vocabulary rows.

    A tied head is packed from the embedding if its rows are this rank's `embedding_rows`; otherwise it reads its own.
    """

    def __init__(
        self, config: ModelConfig, rows: UnitRange, *, embedding_rows: UnitRange, ops: FusedOps = PLAIN_OPS
    ) -> None:
        tied = config.tie_word_embeddings
        self._source = source = _vocabulary_slice(config, EMBEDDING if tied else HEAD, rows, config.hidden_size)
        stored = replace(config.weights, layers=config.weights.vocabulary)
        self._linear = ShardedLinear([source], stored=stored)
        self._shares_rows = tied and rows == embedding_rows
        self._soft_cap = config.logit_soft_cap
        self._ops = ops

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) features on this rank."""
        return self._linear.shape

    @property
    def packed(self) -> PackedWeight:
        """The loaded weight, packed by its kernel."""
        return self._linear.packed

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel) -> int:
        """Return the most bytes that the loaded weight takes beside the embedding's: 0 if both share their memory."""
        is_same = kernel.embeds or not kernel.copies_weight
        return 0 if self._shares_rows and is_same else self._linear.weight_bytes(dtype, kernel)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weight that are not the embedding's."""
        return self._linear.tensors

    def load(
        self,
        checkpoint: Checkpoint,
        embedding: ShardedEmbedding | None,
        *,
        dtype: torch.dtype,
        kernel: LinearKernel,
        device: torch.device = HOST,
    ) -> None:
        """Read or tie the weight; `embedding` is this rank's, loaded, if it has one. Raises ModelError."""
        if self._source.name == EMBEDDING and checkpoint.has(HEAD):
            _check_tied(checkpoint, self._source)
        if self._shares_rows and embedding is not None:
            self._linear.tie(embedding.pack(kernel))
        else:
            self._linear.load(checkpoint, dtype=dtype, kernel=kernel, device=device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocabulary rows of this rank] of [rows, hidden]."""
        logits = self._linear.packed.logits(hidden)
        return logits if self._soft_cap is None else self._ops.capped(logits, self._soft_cap)


def _check_tied(checkpoint: Checkpoint, rows: TensorSlice) -> None:
    """Raise ModelError if the checkpoint holds another output head than the embedding; some of the rows tell."""
    begin, end = rows.row_range
    some = replace(rows, rows=UnitRange(begin, min(begin + _COMPARED_ROWS, end)), quantize_to=None)
    embedding, head = torch.empty(2, *some.shape)
    checkpoint.read(some, embedding)
    checkpoint.read(replace(some, name=HEAD), head)
    if not torch.equal(embedding, head):
        raise ModelError(
            f"tensor {HEAD} differs from {EMBEDDING}, and config.json says that they are one; set tie_word_embeddings "
            "to false in config.json"
        )


def _vocabulary_slice(config: ModelConfig, name: str, rows: UnitRange, width: int) -> TensorSlice:
    shape = config.vocab_size, width
    return TensorSlice(name, shape, rows=rows, quantize_to=config.weights.at_load.vocabulary)
