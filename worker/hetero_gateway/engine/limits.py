"""What a request may ask for: tokens of the vocabulary, within the model's length and the KV cache."""

from __future__ import annotations

from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import GenerationRequest


def resolve_max_tokens(asked: GenerationRequest, *, config: EngineConfig, pool_blocks: int) -> int:
    """Most tokens that the request may generate. Raises InvalidRequest if it can never be served.

    What is asked for is capped at the model's length, as with every engine in the field. It is not capped at
    the pool (`pool_blocks`, null block excluded): that would cut an answer short for a reason the client cannot see.
    A request that leaves max_tokens open gets what both allow.
    """
    num_prompt = len(asked.prompt_token_ids)
    _check_prompt(asked, config=config)
    # The last token is never fed back, so its KV takes no room.
    pool_room = pool_blocks * config.block_size - num_prompt + 1
    model_room = config.max_model_len - num_prompt
    wanted = asked.sampling.max_tokens
    if wanted is not None and wanted < 1:
        raise InvalidRequest("sampling.max_tokens", f"must be at least 1, not {wanted}")
    max_tokens = min(wanted, model_room) if wanted is not None else min(model_room, max(pool_room, 1))
    if max_tokens > pool_room:
        blocks = -(-(num_prompt + max_tokens - 1) // config.block_size)
        raise InvalidRequest(
            "sampling.max_tokens" if pool_room >= 1 else "prompt",
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} need the KV of {num_prompt + max_tokens - 1} "
            f"positions = {blocks} blocks of {config.block_size}; the KV cache has {pool_blocks}",
        )
    return max_tokens


def _check_prompt(asked: GenerationRequest, *, config: EngineConfig) -> None:
    tokens = asked.prompt_token_ids
    if not tokens:
        raise InvalidRequest("prompt", "has no tokens; at least one is needed")
    if len(tokens) >= config.max_model_len:
        raise InvalidRequest(
            "prompt",
            f"has {len(tokens)} tokens; with at least one to generate the model's length of "
            f"{config.max_model_len} allows {config.max_model_len - 1}",
        )
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        bad = next(token for token in tokens if not 0 <= token < config.vocab_size)
        raise InvalidRequest("prompt", f"token id {bad} is outside the vocabulary [0, {config.vocab_size})")
