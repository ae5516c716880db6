"""Prompts of latent attention on a GPU: in the cache's space, and with each head's keys and values made again.

    PYTHONPATH=.:worker:protos python -m bench.gpu.latent_prefill [ROWS ...]

One layer of DeepSeek-V3's attention in bfloat16 with made weights, and whole prompts of so many tokens. Where the
second way begins to be faster is what `LatentExpansion.least_rows` should be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch

from bench.report import aligned
from hetero_api.model_config import ModelConfig
from hetero_worker.attention.base import LatentExpansion
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.layers.rotary import RotaryTables
from hetero_worker.probe.layers import LayerStack, Site, make_step, positions_of
from hetero_worker.probe.sizes import LayerSize
from hetero_worker.probe.synthetic import SyntheticWeights

ROWS: Final = (32, 64, 128, 256, 512, 2048, 8192)
_LAPS: Final = 12
_NEVER: Final = 1 << 30
_MODEL: Final = Path(__file__).parents[2] / "examples/models/deepseek-v3.json"


def seconds(
    config: ModelConfig, backend: DeviceBackend, rows: int, *, expands: bool, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Return the seconds of one layer's attention in a prompt of so many rows."""
    assert config.latent is not None
    attention = backend.attention(config, batch_invariant=False)
    attention.expansion = LatentExpansion(config.latent, least_rows=1 if expands else _NEVER)
    site = Site(
        backend.device,
        dtype,
        backend.linear(dtype, batch_invariant=False),
        attention,
        SyntheticWeights(),
        ops=backend.fused_ops(batch_invariant=False),
        zeros=backend.memory_pool.zeros,
    )
    rotary = RotaryTables(
        config.ropes, head_dims=config.rotary_widths, max_length=rows, dtype=dtype, device=backend.device
    )
    size = LayerSize(heads=config.num_kv_heads, mlp=0, experts=0)
    stack = LayerStack(config, size, copies=1, positions=positions_of(rows, 0), slots=0, site=site)
    with torch.inference_mode():
        (work,) = stack.works(make_step(config, site, rotary, rows=rows, context=0))
        return median(backend.laps([work.work] * _LAPS)[2:])


def main(arguments: Sequence[str]) -> int:
    """Print a table."""
    config = ModelConfig.from_hf(json.loads(_MODEL.read_text(encoding="utf-8")))
    backend = CudaBackend(0, pool="bench")
    backend.open()
    table = [["rows", "in the cache's space, ms", "expanded, ms", "ratio"]]
    for rows in map(int, arguments) if arguments else ROWS:
        absorbed, expanded = (seconds(config, backend, rows, expands=expands) for expands in (False, True))
        table.append([f"{rows}", f"{absorbed * 1e3:.3f}", f"{expanded * 1e3:.3f}", f"{absorbed / expanded:.2f}"])
    print(f"DeepSeek-V3, one layer on {backend.name}")
    print(aligned(table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
