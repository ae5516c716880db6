"""A request as the scheduler holds it, made of one that was asked for."""

from __future__ import annotations

from hetero_gateway.engine.block_pool import BlockDigests
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.limits import end_token_ids
from hetero_gateway.engine.request import Completion, FinishReason, GenerationRequest, Request, derived_seed


def new_request(
    asked: GenerationRequest, *, max_tokens: int, arrival_s: float, order: int, config: EngineConfig, block_size: int
) -> Request:
    """With all its completions, none of which is queued or has ended."""
    request = Request(asked=asked, max_tokens=max_tokens, arrival_s=arrival_s, order=order)
    request.completions = tuple(
        _new_completion(request, index, config=config, block_size=block_size) for index in range(asked.n)
    )
    request.num_open = asked.n
    request.num_queued_tokens = num_queued_tokens(asked)
    # They are told before the first token, so a client that has tokens has them.
    if asked.sampling.prompt_logprobs is not None and not any(asked.received):
        request.prompt_logprobs = []
    return request


def num_queued_tokens(asked: GenerationRequest) -> int:
    """Return how many tokens the completions of a request have before the first step."""
    return asked.n * len(asked.prompt_token_ids) + sum(map(len, asked.received))


def mark_if_received_whole(completion: Completion) -> bool:
    """Whether the received tokens are the whole completion; then it says why it ended."""
    if completion.num_received == 0:
        return False
    last = completion.token_ids[-1]
    if last in completion.end_token_ids:
        completion.reason, completion.stop_token_id = FinishReason.STOP, last
    elif completion.num_tokens == completion.max_num_tokens:
        completion.reason = FinishReason.LENGTH
    return completion.reason is not None


def _new_completion(request: Request, index: int, *, config: EngineConfig, block_size: int) -> Completion:
    asked = request.asked
    received = asked.received[index] if index < len(asked.received) else ()
    return Completion(
        request=request,
        index=index,
        seed=derived_seed(asked.sampling.seed, index),
        urgency=(request.arrival_s + asked.priority * config.ageing_s, request.order, index),
        token_ids=[*asked.prompt_token_ids, *received],
        num_received=len(received),
        end_token_ids=end_token_ids(asked, config=config),
        digests=BlockDigests(cache_salt=asked.cache_salt, block_size=block_size),
    )
