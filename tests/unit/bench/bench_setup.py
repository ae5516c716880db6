"""Figures and runs that were never measured, for the bench's pure parts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bench.contenders import Contender, Measured
from bench.entrants import Entrant, Setting
from bench.limits import Limits
from bench.peers.environments import PeerError
from bench.report import Figure, Row, Width
from bench.workloads import Workload
from hetero_api.model_config import ModelConfig

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }
)  # fmt: skip
HEAD_WEIGHTS = 500 * 64
BODY_WEIGHTS = CONFIG.num_parameters - HEAD_WEIGHTS

LIMITS = Limits(threads=2, read_bytes_per_s=1e9, fp32_flops=1e9, bf16_flops=2e9, int8_ops=8e9)
EXACT = Width(16, "float32")

DECODE = Workload("decode1", ((1, 2, 3, 4),), 9)
PREFILL = Workload("prefill512", (tuple(range(16)),), 1)
BATCH = Workload("batch8", ((1, 2), (3, 4, 5)), 10)


class Absent(Entrant):
    """Nobody: it can be counted and grouped."""

    def open(self, setting: Setting) -> Contender:
        raise PeerError(f"{self.name} is nobody")


class Scripted:
    """Writes down what is done with it; makes too few tokens, or breaks, where it is told to."""

    def __init__(self, name: str, diary: list[str], *, short_at: int = -1, breaks_at: int = -1) -> None:
        self.name, self._diary = name, diary
        self._short_at, self._breaks_at, self._count = short_at, breaks_at, 0
        self.pid = os.getpid()
        self.held = True

    def start(self) -> float:
        return 0.0

    def facts(self) -> Mapping[str, str]:
        return {}

    def run(self, workload: Workload) -> Measured:
        assert not self.held
        number, self._count = self._count, self._count + 1
        if number == self._breaks_at:
            raise RuntimeError("broke")
        self._diary.append(f"{self.name} {workload.name}")
        return Measured(1.0 + number, 0.5, workload.output_tokens - (number == self._short_at))

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def peak_bytes(self) -> int:
        return 0

    def allowed_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        pass


def measured(workload: Workload, *, elapsed_s: float = 2.0, first_token_s: float = 1.0) -> Measured:
    heads = tuple(prompt[:2] for prompt in workload.prompts)
    return Measured(elapsed_s, first_token_s, workload.output_tokens, heads)


def row(
    figures: Mapping[str, float],
    *,
    bits: int = 16,
    arithmetic: str = "float32",
    ours: bool = False,
    first_start_s: float = 6.0,
    start_s: float = 3.0,
    peak_bytes: int = 900,
    allowed_bytes: int = 1000,
) -> Row:
    """With these tokens/s."""
    return Row(
        Width(bits, arithmetic),
        {name: Figure(speed, speed, speed, 0.5, 3) for name, speed in figures.items()},
        first_start_s,
        start_s,
        peak_bytes,
        ours,
        allowed_bytes,
    )
