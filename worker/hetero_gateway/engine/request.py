"""One request: what was asked (frozen) and how far it is (mutable, owned by the scheduler).

A request has no phases. It has tokens, of which the first `num_computed_tokens` have their KV in
`block_ids`; the scheduler lets the second number chase the first. Prefill, decode, chunks, prefix hits and the
way back after a preemption differ only in the distance between the two.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hetero_gateway.engine.block_pool import BlockDigests


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's length."""
    ABORT = "abort"
    """Somebody ended it."""


class RequestStatus(enum.Enum):
    """Where the scheduler keeps a request."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen and what ends them. Meanings and bounds: `SamplingParams` in inference.proto.

    `max_tokens` None means as many as the model's length and the KV cache allow.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion. `deadline_s` is a time of the engine's monotonic clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingConfig
    cache_salt: str = ""
    deadline_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request that the scheduler holds. Only the scheduler writes to it.

    `max_tokens` is resolved; `order` is its place in the order of arrival. `slot` and `block_ids` mean something
    while it runs; `in_flight` says that the step which ranks now compute includes it, hence that they may still
    write to its blocks.
    """

    asked: GenerationRequest
    max_tokens: int
    arrival_s: float
    order: int
    digests: BlockDigests
    token_ids: list[int]
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_registered_blocks: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int = -1
    in_flight: bool = False
    first_scheduled_s: float | None = None
    num_cached_tokens: int = 0

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt's and the generated ones."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.asked.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]
