"""Sampling parameters on their way: both doors read them into the one message that ranks get."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import ranks_pb2
from hetero_gateway.server.openai.requests import chat_requests, completion_requests
from hetero_gateway.server.openai.schema import ChatBody, CompletionBody
from hetero_gateway.server.sampling_params import resolved_sampling

pytestmark = pytest.mark.unit

GIVEN: dict[str, Any] = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seed": 9, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 2, "logit_bias": {5: 2.0, 3: -1.0},
}  # fmt: skip
ALL = ranks_pb2.Sampling(
    temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=9, presence_penalty=0.5, frequency_penalty=-0.5,
    repetition_penalty=1.5, min_tokens=2, bias_token_ids=[3, 5], biases=[-1.0, 2.0],
)  # fmt: skip
BODY = GIVEN | {"logit_bias": {"5": 2.0, "3": -1.0}, "model": "g"}


def _resolved(request: pb.GenerateRequest) -> ranks_pb2.Sampling:
    return resolved_sampling(request.sampling)


def test_both_doors_resolve_to_the_same_message() -> None:
    assert resolved_sampling(pb.SamplingParams(**GIVEN)) == ALL
    (completion,) = completion_requests(CompletionBody(**BODY, prompt="a"), "r")
    body = ChatBody.model_validate(BODY | {"messages": [{"role": "user", "content": "a"}]})
    (chat,) = chat_requests(body, "r")
    assert _resolved(completion) == _resolved(chat) == ALL


def test_what_is_not_given_has_the_default_that_the_contract_states() -> None:
    sampling = resolved_sampling(pb.SamplingParams(seed=1))
    assert sampling == ranks_pb2.Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=1)
    assert not sampling.HasField("num_logprobs")


def test_a_zero_that_is_given_is_no_default() -> None:
    sampling = resolved_sampling(pb.SamplingParams(temperature=0.0, seed=0, logprobs=0, prompt_logprobs=0))
    assert (sampling.temperature, sampling.seed) == (0.0, 0)
    assert sampling.HasField("num_logprobs")
    assert sampling.HasField("num_prompt_logprobs")


def test_seeds_that_are_drawn_differ() -> None:
    assert resolved_sampling(pb.SamplingParams()).seed != resolved_sampling(pb.SamplingParams()).seed


def test_every_field_that_ranks_know_is_filled_by_a_parameter_or_by_the_engine() -> None:
    """A parameter that is added to one message only does not go unnoticed."""
    from_engine = {"end_token_ids", "pooling"}
    filled = {
        field.name
        for field, _ in resolved_sampling(pb.SamplingParams(**GIVEN, logprobs=1, prompt_logprobs=1)).ListFields()
    }
    assert filled | from_engine == set(ranks_pb2.Sampling.DESCRIPTOR.fields_by_name)
