"""Bounds of the engine, resolved once at start-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the scheduler and the core may do. Raises ValueError that names the field when a bound is no bound.

    `max_model_len` is the longest prompt plus completion, in tokens. `max_queued_requests` bounds the requests
    that wait although every sequence of a step is taken; those that the next step can start do not count.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int
    max_queued_requests: int
    enable_prefix_caching: bool
    eos_token_ids: frozenset[int]
    vocab_size: int

    def __post_init__(self) -> None:
        least = {"max_model_len": 2, "max_queued_requests": 0}
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_model_len",
            "max_queued_requests",
            "vocab_size",
        ):
            if getattr(self, name) < least.get(name, 1):
                raise ValueError(f"{name} must be at least {least.get(name, 1)}, not {getattr(self, name)}")
