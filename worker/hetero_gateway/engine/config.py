"""Bounds of the engine, resolved once at start-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of the scheduler and the core. Raises ValueError, naming the field, when a bound is impossible.

    `block_size` is that of the first KV cache; a reset of the cache can change it. `max_model_len` is the longest
    prompt plus completion, in tokens. `max_queued_requests` bounds the requests that wait although every sequence of a
    step is taken; those that the next step can start do not count. `max_queued_tokens` bounds their memory: tokens of
    prompts, each as often as it has completions, beside those that the KV cache can hold. `max_steps_in_flight` 2 lets
    the next plan go out before the last result came, 1 does not. With 2, as many steps that only decode go out besides
    as take about `lookahead_s` together, so that plans and results of short steps travel together; a new request waits
    that much longer, and a completion that ended may be computed that much longer; 0 lets none out. A request that has
    waited `pause_limit_s` for a group of ranks to come back ends. `ageing_s` is how long a request waits to gain on a
    newer one of the next lower priority number.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int
    max_queued_requests: int
    enable_prefix_caching: bool
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_queued_tokens: int = 1 << 22
    max_steps_in_flight: int = 2
    lookahead_s: float = 0.0
    pause_limit_s: float = 60.0
    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        least = {"max_model_len": 2, "max_queued_requests": 0, "max_queued_tokens": 0}
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_model_len",
            "max_queued_requests",
            "max_queued_tokens",
            "vocab_size",
        ):
            if getattr(self, name) < least.get(name, 1):
                raise ValueError(f"{name} must be at least {least.get(name, 1)}, not {getattr(self, name)}")
        if self.max_steps_in_flight not in (1, 2):
            raise ValueError(f"max_steps_in_flight must be 1 or 2, not {self.max_steps_in_flight}")
        if not self.lookahead_s >= 0:
            raise ValueError(f"lookahead_s must be 0 or more, not {self.lookahead_s}")
        for name in ("pause_limit_s", "ageing_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
