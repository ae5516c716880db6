"""One request: what was asked (frozen), and how far each of its completions is (mutable, owned by the scheduler).

The scheduler schedules completions; a request has `n` of them, with one prompt. A completion has no phases. It has
tokens, and the KV of the first `num_scheduled` of them is in `block_ids` once every step that is out is done; the
scheduler lets the second number chase the first. Prefill, decode, chunks, prefix hits and the way back after a
preemption or a lost group differ only in the distance between the two.

With steps in flight a completion has more tokens than are known here: those that the steps will sample. They are its
*pending* tokens; ranks know them first, and only their number is known here.
"""

from __future__ import annotations

import enum
import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_api.v1 import inference_pb2, logprobs_pb2, ranks_pb2
from hetero_gateway.engine.block_pool import BlockDigests
from hetero_gateway.engine.telemetry.request_trace import RequestTrace

Urgency = tuple[float, int, int]
"""Order of service, smallest first: time of arrival, put off by priority; order of arrival; index in the request."""


class FinishReason(enum.IntEnum):
    """Reason why a completion ended, numbered as in inference.proto."""

    STOP = inference_pb2.FINISH_REASON_STOP
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = inference_pb2.FINISH_REASON_LENGTH
    """max_tokens or the model's length."""
    ABORT = inference_pb2.FINISH_REASON_ABORT
    """Somebody ended it."""


class ConstraintKind(enum.Enum):
    """Kind of form that a completion can be bound to; its value is the name of its field in SamplingParams."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that a completion is bound to. `choices` is what CHOICE has in place of `text`.

    `prelude` is a Lark grammar of what comes before the form, which it names `@form`; empty: nothing. With `has_frame`
    the form writes the model's own marks, e.g. of channels, which other forms do without. `source` is the field that
    it was made of, where it is not the form's own in a GenerateRequest.
    """

    kind: ConstraintKind
    text: str
    choices: tuple[str, ...] = ()
    prelude: str = ""
    has_frame: bool = False
    source: str = ""

    @property
    def field_name(self) -> str:
        """Path of its field in a GenerateRequest."""
        return self.source or f"sampling.{self.kind.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request for `n` completions of one prompt. `deadline_s` is a time of the engine's monotonic clock.

    Lower numbers of `priority` go first. `received` holds, per completion, the tokens that the client already has, from
    an earlier stream of the same request: they are output and known, and are never sent again.

    `sampling` is resolved: ranks get it as it is, but for what is each completion's own. The fields that end or bind a
    completion stand beside it, with the meanings of `SamplingParams` in inference.proto; `max_tokens` None means as
    many as the model's length and the KV cache allow.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: ranks_pb2.Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    cache_salt: str = ""
    deadline_s: float | None = None
    n: int = 1
    priority: int = 0
    received: tuple[tuple[int, ...], ...] = ()
    adapter: int = 0
    """Number of the adapter that answers; 0: the model itself. The cache salt has its own, too."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text, as they are written."""


@dataclass(slots=True, kw_only=True, eq=False)
class Completion:
    """One completion of a request. Only the scheduler writes to it.

    `token_ids` are the known tokens: the prompt's, `num_received` received ones, generated ones. `end_token_ids` end
    it. `ended`, with `reason` and, if a token was the reason, `stop_token_id`, is for good; `reason` stays None when
    somebody else ended it (an abort, a deadline, a stop string).

    `slot`, `block_ids` and the fields after them mean something while it runs. Each start begins another residency:
    what a step did for an earlier one says nothing about the blocks of this one. `num_scheduled` is out of date while
    it is in the decode batch, which knows better. The KV of the first `num_filled` tokens is there, by steps that are
    done; once `is_prefilled`, that of all known tokens but the last.
    """

    request: Request
    index: int
    seed: int
    urgency: Urgency
    token_ids: list[int]
    num_received: int
    end_token_ids: frozenset[int]
    digests: BlockDigests
    ended: bool = False
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    residency: int = 0
    num_scheduled: int = 0
    num_filled: int = 0
    is_prefilled: bool = False
    num_registered_blocks: int = 0
    decode_offset: int = 0
    next_block_day: int = -1
    last_draw_day: int = -1

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt's, received and generated ones."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.asked.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Received and generated tokens."""
        return len(self.token_ids) - len(self.request.asked.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the received and generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_masked(self) -> bool:
        """Whether each of its draws is bound to a mask."""
        return self.request.asked.constraint is not None

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities come with its tokens."""
        return self.request.asked.sampling.HasField("num_logprobs")

    @property
    def max_num_tokens(self) -> int:
        """Number of tokens at which max_tokens ends it."""
        return self.num_prompt_tokens + self.request.max_tokens


@dataclass(slots=True)
class PooledStates:
    """Hidden states of a prompt that have come so far, in one residency of its completion."""

    residency: int
    num_tokens: int = 0
    sums: list[float] = field(default_factory=list)

    def add(self, sums: Sequence[float], num_tokens: int) -> None:
        """Add the sum of some tokens' hidden states. Raises ValueError if it has another width."""
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)] if self.sums else list(sums)
        self.num_tokens += num_tokens

    def mean(self) -> list[float]:
        """Return the mean, one number a hidden dimension."""
        return [each / self.num_tokens for each in self.sums]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Request that the scheduler holds. Only the scheduler writes to it.

    `max_tokens` is resolved, for each completion; `order` is its place in the order of arrival.
    `num_queued_tokens` counts the tokens of all completions on arrival: the prompt as often as there are completions.
    `prompt_logprobs` are those that have come so far, of one completion's residency; None if none are to come (any
    more).
    """

    asked: GenerationRequest
    max_tokens: int
    arrival_s: float
    order: int
    completions: tuple[Completion, ...] = ()
    first_scheduled_s: float | None = None
    num_cached_tokens: int = 0
    num_queued_tokens: int = 0
    num_open: int = 0
    num_running: int = 0
    parked: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[logprobs_pb2.TokenLogprobs] | None = None
    prompt_logprobs_source: tuple[Completion, int] | None = None
    trace: RequestTrace | None = None
    """Spans of the request; None if nobody wants them."""
    pooled: PooledStates | None = None
    """Set once it runs, if an embedding is asked for."""
    num_losses: int = 0
    """Groups that were lost while they computed it, one after another without a token in between."""
    num_tokens_at_loss: int = -1

    @property
    def deadline_s(self) -> float:
        """Time of the engine's clock at which it ends; infinite without a deadline."""
        return math.inf if self.asked.deadline_s is None else self.asked.deadline_s

    @property
    def request_id(self) -> str:
        """Id that the client gave it."""
        return self.asked.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.asked.prompt_token_ids)

    @property
    def ended(self) -> bool:
        """Whether every completion has ended."""
        return self.num_open == 0

    @property
    def first_open(self) -> Completion | None:
        """The first completion that has not ended."""
        return next((completion for completion in self.completions if not completion.ended), None)


def new_request(
    asked: GenerationRequest,
    *,
    max_tokens: int,
    arrival_s: float,
    order: int,
    ageing_s: float,
    end_token_ids: frozenset[int],
    block_size: int,
) -> Request:
    """Return a request with all its completions, none of which is queued or has ended."""
    request = Request(asked=asked, max_tokens=max_tokens, arrival_s=arrival_s, order=order)
    urgency_s = arrival_s + asked.priority * ageing_s
    request.completions = tuple(
        _new_completion(request, index, urgency_s=urgency_s, end_token_ids=end_token_ids, block_size=block_size)
        for index in range(asked.n)
    )
    request.num_open = asked.n
    request.num_queued_tokens = num_queued_tokens(asked)
    # They are sent before the first token, so a client that has tokens has them.
    if asked.sampling.HasField("num_prompt_logprobs") and not any(asked.received):
        request.prompt_logprobs = []
    return request


def num_queued_tokens(asked: GenerationRequest) -> int:
    """Return how many tokens the completions of a request have before the first step."""
    return asked.n * len(asked.prompt_token_ids) + sum(map(len, asked.received))


def num_generated_tokens(request: Request) -> int:
    """Return how many tokens were generated for all completions of a request, received ones not counted."""
    return sum(each.num_output_tokens - each.num_received for each in request.completions)


def note_loss(request: Request) -> None:
    """Count the loss of the group that computed it."""
    generated = num_generated_tokens(request)
    request.num_losses = request.num_losses + 1 if generated == request.num_tokens_at_loss else 1
    request.num_tokens_at_loss = generated


def mark_if_received_whole(completion: Completion) -> bool:
    """Return whether the received tokens are the whole completion, and then note why it ended."""
    if completion.num_received == 0:
        return False
    last = completion.token_ids[-1]
    if last in completion.end_token_ids:
        completion.reason, completion.stop_token_id = FinishReason.STOP, last
    elif completion.num_tokens == completion.max_num_tokens:
        completion.reason = FinishReason.LENGTH
    return completion.reason is not None


def _new_completion(
    request: Request, index: int, *, urgency_s: float, end_token_ids: frozenset[int], block_size: int
) -> Completion:
    asked = request.asked
    received = asked.received[index] if index < len(asked.received) else ()
    return Completion(
        request=request,
        index=index,
        seed=derived_seed(asked.sampling.seed, index),
        urgency=(urgency_s, request.order, index),
        token_ids=[*asked.prompt_token_ids, *received],
        num_received=len(received),
        end_token_ids=end_token_ids,
        digests=BlockDigests(cache_salt=asked.cache_salt, block_size=block_size),
    )


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index`: the request's own for the first, else 64 bits made of both."""
    if index == 0:
        return seed
    digest = hashlib.sha256(b"hetero-completion-seed\0" + struct.pack("<QQ", seed, index)).digest()
    return int.from_bytes(digest[:8], "little")
