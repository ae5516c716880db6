"""Prompts whose experts come to the GPU, beside those whose experts stay on CPU ranks: one model, loaded once.

The GPU has attention and vocabulary, CPU ranks all experts. One prompt is one step, first streamed and then resident,
several times in turn; the best of each counts, against what the solver predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.gpu.hetero import measured_hardware, memory_of
from bench.gpu.orders import Bounds, Load
from bench.gpu.ranks import RankProcesses
from bench.gpu.recipes import decoding
from bench.gpu.report import Row
from bench.gpu.serving import CapacityError, Replica
from hetero_api.model_config import ModelConfig
from hetero_api.spec import PlacementShares, PlacementSpec
from hetero_placement import decision
from hetero_placement.solver import solve

_TURNS: Final = 3


@dataclass(frozen=True, slots=True)
class Streamed:
    """A model, and the prompt that is computed."""

    name: str
    config: ModelConfig
    cap_bytes: int
    """Of the GPU."""
    prompt: int
    """Tokens."""
    need_s: float


def prefill_rows(group: RankProcesses, asked: Streamed, *, dtype: str, limit_s: float) -> list[Row]:
    """Measure the prompt both ways. Raises CapacityError where nothing can be streamed."""
    seats, memory = group.seats, memory_of(group.seats, asked.cap_bytes)
    hosts = [float(seat.rank >= seat.num_gpu_ranks) for seat in seats]
    on_gpu = [1.0 - share for share in hosts]
    found = solve(
        asked.config,
        measured_hardware(group, asked.config, dtype, memory),
        dtype=dtype,
        placement=PlacementSpec(shares=PlacementShares(attention=on_gpu, mlp=hosts, vocabulary=on_gpu)),
        bounds=decision.Bounds(
            max_model_len=asked.prompt + 16, max_num_batched_tokens=asked.prompt, max_num_seqs=1, expert_streaming=1
        ),
    )
    streaming = found.chosen.streaming
    if streaming is None:
        raise CapacityError(f"{asked.name}: nothing is streamed: {found.chosen.no_streaming}")
    bounds = Bounds(asked.prompt + 16, asked.prompt, 1)
    load = Load(asked.config, dtype, found.plan, bounds, memory, expert_buffer_bytes=streaming.buffer_bytes)
    replica = Replica(group, load, most_tokens=asked.prompt + 16)
    recipe = decoding(asked.config.vocab_size, sequences=1, prompt=asked.prompt, output=1)
    best: dict[int | None, float] = {}
    for _ in range(_TURNS):
        for streams_from in (1, None):
            replica.streams_from = streams_from
            seconds = replica.serve(recipe, limit_s=limit_s).first_token_s
            best[streams_from] = min(seconds, best.get(streams_from, seconds))
    told = {1: ("streamed", streaming.chunk_s), None: ("resident", streaming.resident_chunk_s)}
    return [
        Row(f"{asked.name}: prompt of {asked.prompt}, {name}", asked.prompt / best[way], asked.prompt / predicted_s)
        for way, (name, predicted_s) in told.items()
    ]
