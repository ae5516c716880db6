"""Compares what a group of GPU ranks and CPU ranks draws, on every way of a sequence to the cache, with transformers.

In float32 logits are the reference's but for rounding. In bfloat16 they are as near to the reference's in float32 as
the reference itself comes in bfloat16, or nearer, on average over all draws; twice that is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetero_api.v1 import ranks_pb2
from tests.support.mixed_runners import Drawn, body
from tests.support.rank_processes import run_ranks
from tests.support.rank_shares import Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

FLOAT32_TOLERANCE = 2e-3
_BFLOAT16_ALLOWED = 2.0
_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 320, "head_dim": 16, "num_hidden_layers": 4,
    "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
LAYOUTS = {
    "the GPU alone": Shares(kv_heads=((8,),), mlp_columns=((320,),), vocab_rows=(320,)),
    "2 CPU ranks on MLP only": Shares(kv_heads=((8, 0, 0),), mlp_columns=((192, 100, 28),), vocab_rows=(320, 0, 0)),
    "3 CPU ranks on all parts": Shares(
        kv_heads=((4, 1, 2, 1),), mlp_columns=((128, 64, 64, 64),), vocab_rows=(128, 64, 64, 64)
    ),
    "layers on the GPU, then on 4 CPU ranks": Shares(
        kv_heads=((8, 0, 0, 0, 0), (8, 0, 0, 0, 0), (0, 4, 4, 0, 0), (0, 4, 4, 0, 0)),
        mlp_columns=((320, 0, 0, 0, 0), (320, 0, 0, 0, 0), (0, 80, 80, 80, 80), (0, 80, 80, 80, 80)),
        vocab_rows=(0, 160, 160, 0, 0),
        embedding_rows=(320, 0, 0, 0, 0),
    ),
}
"""Rank 0 is the GPU rank."""


def save_checkpoint(variant: str, directory: Path) -> TinyCheckpoint:
    """Of a variant of tiny_checkpoints, wide enough for every kernel."""
    return save_tiny(variant, directory, **_SHAPE)


def check(
    checkpoint: TinyCheckpoint, shares: Shares, *, dtype: str, pseudo: bool, changes: Mapping[str, Any] | None = None
) -> None:
    """One GPU rank, or pseudo GPU, and the other ranks on host cores. Raises AssertionError."""
    drawn = draws(checkpoint.directory, shares, dtype=dtype, pseudo=pseudo, changes=changes)
    expected = [checkpoint.logits(draw.tokens)[-1] for draw in drawn]
    if dtype == "float32":
        assert _largest(drawn, expected) <= FLOAT32_TOLERANCE
        return
    rounded = TinyCheckpoint(checkpoint.directory, copy.deepcopy(checkpoint.reference).bfloat16())
    own = [rounded.logits(draw.tokens)[-1] for draw in drawn]
    allowed = _mean([(a - b).abs().mean() for a, b in zip(own, expected, strict=True)])
    assert _mean([(_logits(a) - b).abs().mean() for a, b in zip(drawn, expected, strict=True)]) <= (
        _BFLOAT16_ALLOWED * allowed
    )


def draws(
    directory: Path, shares: Shares, *, dtype: str, pseudo: bool, changes: Mapping[str, Any] | None = None
) -> list[Drawn]:
    """What the group draws; all ranks agree on it."""
    world = len(shares.vocab_rows)
    kind = ranks_pb2.EXCHANGE_KIND_SHM
    results: list[list[Drawn]] = run_ranks(body, world, kind, directory, shares, 1, dtype, pseudo, dict(changes or {}))
    assert all(drawn == results[0] for drawn in results)
    return results[0]


def _logits(draw: Drawn) -> torch.Tensor:
    return torch.tensor(draw.logits)


def _largest(drawn: Sequence[Drawn], expected: Sequence[torch.Tensor]) -> float:
    return max(float((_logits(a) - b).abs().max()) for a, b in zip(drawn, expected, strict=True))


def _mean(values: Sequence[torch.Tensor]) -> float:
    return float(torch.stack(list(values)).mean())
