"""Tiny models of the large families on a GPU rank, alone and beside CPU ranks: they draw what torch's operators draw.

That these draw what transformers draws is shown elsewhere, for each family. The models are as wide as our kernels want
them. CPU ranks multiply quantised weights in whole numbers, so groups are compared with weights that are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.distributed.exchange import LocalExchange
from tests.support.mixed_reference import draws
from tests.support.mixed_runners import Drawn, largest_difference, work_off
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.rank_shares import Shares
from tests.support.tiny_checkpoints import save_tiny

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 320, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "qwen3-moe": {},
    "gpt-oss": {},
    "deepseek-v3": {"kv_lora_rank": 32, "qk_rope_head_dim": 16},
    "gemma3": {},
}
QUANTIZED: Final = ("int4", "int8")
ALONE: Final = "the GPU alone"
LAYOUTS: Final = {
    ALONE: Shares(kv_heads=((8,),), mlp_columns=((320,),), vocab_rows=(320,), experts=((6,),)),
    "2 CPU ranks with experts": Shares(
        kv_heads=((8, 0, 0),), mlp_columns=((192, 100, 28),), vocab_rows=(320, 0, 0), experts=((2, 3, 1),)
    ),
}
TOLERANCE: Final = 2e-3
"""Largest difference of logits in float32."""
ALLOWED: Final = 2.0
"""Times the difference that torch's operators make in bfloat16: where experts are nearly tied, roundings choose."""


def float32_difference(family: str, directory: Path, layout: str, weights: str, *, pseudo: bool) -> float:
    """Largest difference of a group's logits from those of torch's operators with the same weights."""
    changes = _saved(family, directory, weights)
    drawn = draws(directory, LAYOUTS[layout], dtype="float32", pseudo=pseudo, changes=changes)
    return largest_difference(drawn, _by_torch(directory, "float32", changes))


def bfloat16_differences(family: str, directory: Path, weights: str, *, eager: bool) -> tuple[float, float]:
    """Mean differences from torch's operators in float32: of a rank in bfloat16, and of torch's operators in it."""
    changes = _saved(family, directory, weights)
    exact, rounded = (_by_torch(directory, dtype, changes) for dtype in ("float32", "bfloat16"))
    changes["enforce_eager"] = eager
    drawn = draws(directory, LAYOUTS[ALONE], dtype="bfloat16", pseudo=False, changes=changes)
    return _mean_difference(drawn, exact), _mean_difference(rounded, exact)


def _saved(family: str, directory: Path, weights: str) -> dict[str, Any]:
    """Changes of the load request."""
    save_tiny(family, directory, **{**_SHAPE, **FAMILIES[family]})
    return {"config": ModelConfig.from_directory(directory).quantized(weights)}


def _by_torch(directory: Path, dtype: str, changes: Mapping[str, Any]) -> list[Drawn]:
    return work_off(PseudoGpu(0), directory, LAYOUTS[ALONE], 0, LocalExchange(), dtype=dtype, changes=changes)


def _mean_difference(drawn: Sequence[Drawn], other: Sequence[Drawn]) -> float:
    """Of draws after the same tokens; the first of each sequence always is one."""
    pairs = [(one.logits, two.logits) for one, two in zip(drawn, other, strict=True) if one.tokens == two.tokens]
    return float(torch.tensor([one for one, _ in pairs]).sub(torch.tensor([two for _, two in pairs])).abs().mean())
