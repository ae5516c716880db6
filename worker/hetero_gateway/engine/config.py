"""Bounds of the engine, resolved once at start-up, and the limits of a request that follow from them.

A request asks for tokens of the vocabulary, within the model's length and the KV cache. Memory is counted for all of
its completions at once, as many as a step may hold: they share the full blocks of the prompt, and each has the rest for
itself. So no request can only be served by preempting itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are proposed: at most `max_tokens` a completion and step.

    With `only_if_faster` only where measurements promise more tokens per second than without. `drafts`: by the draft
    model of rank 0; else by n-gram lookup. `has_head`: that model is a prediction head of the served one.
    """

    max_tokens: int
    only_if_faster: bool = False
    drafts: bool = False
    has_head: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds of the scheduler and the core. The resource, which they come from, has been checked.

    `block_size` is that of the first KV cache; a reset of the cache can change it. `max_model_len` is the longest
    prompt plus completion, in tokens. `max_queued_requests` bounds the requests that wait although every sequence of a
    step is taken; those that the next step can start do not count. `max_queued_tokens` bounds their memory: tokens of
    prompts, each as often as it has completions, beside those that the KV cache can hold. `max_steps_in_flight` 2 lets
    the next plan go out before the last result came, 1 does not. With 2, as many steps that only decode go out besides
    as take about `lookahead_s` together, so that plans and results of short steps travel together; a new request waits
    that much longer, and a completion that ended may be computed that much longer; 0 lets none out. A request that has
    waited `pause_limit_s` for a group of ranks to come back ends. `ageing_s` is how long a request waits to gain on a
    newer one of the next lower priority number. `keeps_states` is whether some of the model's layers keep states of
    each sequence in place of keys and values: one can then begin only where there is a snapshot of them. `speculation`
    None: no tokens are proposed.
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
    keeps_states: bool = False
    speculation: SpeculationConfig | None = None


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of the KV cache: `num_blocks` for requests (without the null block), of `block_size` positions.

    `shares_prompts`: completions of one prompt share its full blocks.
    """

    num_blocks: int
    block_size: int
    shares_prompts: bool = True

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens need."""
        return -(-num_tokens // self.block_size)

    def shared_blocks(self, num_prompt: int) -> int:
        """Return how many full blocks of a prompt its completions share."""
        return (num_prompt - 1) // self.block_size if self.shares_prompts else 0

    def room(self, num_prompt: int, *, at_once: int = 1) -> int:
        """Return the most tokens that each of `at_once` completions may have, alone in the cache; below 1: none."""
        shared = self.shared_blocks(num_prompt)
        blocks = shared + (self.num_blocks - shared) // at_once
        return blocks * self.block_size - num_prompt + 1


def resolve_max_tokens(asked: GenerationRequest, *, config: EngineConfig, cache: CacheSize) -> int:
    """Return the most tokens that each completion may have. Raises InvalidRequest if it can never be served.

    The wanted number is capped at the model's length, as in every engine of the field. It is not capped at the cache:
    that would cut an answer short for a reason the client cannot see. A request that leaves max_tokens
    open gets what both allow.
    """
    _check_prompt(asked, config=config)
    num_prompt = len(asked.prompt_token_ids)
    model_room = config.max_model_len - num_prompt
    wanted = asked.max_tokens
    if wanted is not None and wanted < 1:
        raise InvalidRequest("sampling.max_tokens", f"must be at least 1, not {wanted}")
    at_once = min(asked.n, max_running(config))
    cache_room = cache.room(num_prompt, at_once=at_once)
    max_tokens = min(wanted, model_room) if wanted is not None else min(model_room, max(cache_room, 1))
    if max_tokens > cache_room:
        raise does_not_fit(num_prompt, max_tokens, at_once=at_once, cache=cache)
    _check_received(asked, max_tokens=max_tokens, config=config)
    return max_tokens


def max_running(config: EngineConfig) -> int:
    """Return the most completions that may run. Each can then compute a token in every step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def num_proposal_snapshots(config: EngineConfig, num_snapshots: int) -> int:
    """Return how many of the snapshots of states are for those behind proposed tokens."""
    if config.speculation is None or not config.keeps_states:
        return 0
    return min(num_snapshots // 2, config.max_num_seqs)


def does_not_fit(num_prompt: int, max_tokens: int, *, at_once: int, cache: CacheSize) -> InvalidRequest:
    """Return the error that so many tokens do not fit, with the arithmetic."""
    # The last token is never fed back, so its KV takes no room.
    num_positions = num_prompt + max_tokens - 1
    blocks = cache.blocks_of(num_positions)
    shared = cache.shared_blocks(num_prompt)
    together = (
        f"; {at_once} completions share {shared} of them and need {shared + at_once * (blocks - shared)}"
        if at_once > 1
        else ""
    )
    return InvalidRequest(
        "sampling.max_tokens" if cache.room(num_prompt, at_once=at_once) >= 1 else "prompt",
        f"{num_prompt} prompt tokens and max_tokens {max_tokens} need the KV of {num_positions} positions = {blocks} "
        f"blocks of {cache.block_size}{together}; the KV cache has {cache.num_blocks}",
    )


def check_prompt_length(num_tokens: int, *, max_model_len: int, all_counted: bool = True) -> None:
    """Raise InvalidRequest if a prompt of `num_tokens`, or more, leaves no room for a token to generate."""
    if num_tokens >= max_model_len:
        raise InvalidRequest(
            "prompt",
            f"has {'' if all_counted else 'at least '}{num_tokens} tokens; with at least one to generate the model's "
            f"length of {max_model_len} allows {max_model_len - 1}",
            is_too_long=True,
        )


def check_prompt_bytes(num_bytes: int, *, longest_token_bytes: int, max_model_len: int) -> None:
    """Raise InvalidRequest if text of `num_bytes` has too many tokens, however long each of them is."""
    if num_bytes > longest_token_bytes * (max_model_len - 1):
        raise InvalidRequest(
            "prompt",
            f"has {num_bytes} bytes; tokens of this model have at most {longest_token_bytes}, and with at least one to "
            f"generate the model's length of {max_model_len} allows {max_model_len - 1} of them",
            is_too_long=True,
        )


def _check_prompt(asked: GenerationRequest, *, config: EngineConfig) -> None:
    tokens = asked.prompt_token_ids
    if not tokens:
        raise InvalidRequest("prompt", "has no tokens; at least one is needed")
    check_prompt_length(len(tokens), max_model_len=config.max_model_len)
    _check_vocabulary("prompt", tokens, config=config)
    if asked.n < 1:
        raise InvalidRequest("sampling.n", f"must be at least 1, not {asked.n}")


def _check_received(asked: GenerationRequest, *, max_tokens: int, config: EngineConfig) -> None:
    if len(asked.received) > asked.n:
        raise InvalidRequest("received", f"is of {len(asked.received)} completions; sampling.n asks for {asked.n}")
    ends = end_token_ids(asked, config=config)
    for index, tokens in enumerate(asked.received):
        field = f"received[{index}].token_ids"
        if not tokens:
            continue
        if len(tokens) > max_tokens:
            raise InvalidRequest(field, f"has {len(tokens)} tokens; the completion may have {max_tokens}")
        _check_vocabulary(field, tokens, config=config)
        if not ends.isdisjoint(tokens[:-1]):
            raise InvalidRequest(field, "goes on behind a token that ends the completion")


def end_token_ids(asked: GenerationRequest, *, config: EngineConfig) -> frozenset[int]:
    """Return the tokens that end a completion."""
    return asked.stop_token_ids if asked.ignore_eos else asked.stop_token_ids | config.eos_token_ids


def _check_vocabulary(field: str, tokens: tuple[int, ...], *, config: EngineConfig) -> None:
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        bad = next(token for token in tokens if not 0 <= token < config.vocab_size)
        raise InvalidRequest(field, f"token id {bad} is outside the vocabulary [0, {config.vocab_size})")
