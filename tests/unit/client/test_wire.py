"""What the client's dataclasses become on the wire, and back."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import logprobs_pb2
from hetero_client import wire
from hetero_client.errors import InvalidRequestError
from hetero_client.messages import (
    ChatMessage,
    Choice,
    Constraint,
    Delta,
    Grammar,
    JsonSchema,
    Regex,
    SamplingParams,
    TokenLogprobs,
)

pytestmark = pytest.mark.unit


def sampling_of(params: SamplingParams) -> pb.SamplingParams:
    return wire.generate_request("x", sampling=params).sampling


def test_every_field_of_sampling_has_its_place() -> None:
    message = sampling_of(
        SamplingParams(
            presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.25, logit_bias={3: 1.5, 9: -100},
            min_tokens=2, n=4, logprobs=0, prompt_logprobs=5,
        )
    )  # fmt: skip
    assert (message.presence_penalty, message.frequency_penalty, message.repetition_penalty) == (0.5, -0.5, 1.25)
    assert dict(message.logit_bias) == {3: 1.5, 9: -100.0}
    assert (message.min_tokens, message.n, message.logprobs, message.prompt_logprobs) == (2, 4, 0, 5)
    assert message.HasField("logprobs")


def test_what_is_left_out_is_left_to_the_server() -> None:
    assert sampling_of(SamplingParams()) == pb.SamplingParams()


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        (JsonSchema({"type": "object"}), "json_schema", '{"type": "object"}'),
        (JsonSchema("{}"), "json_schema", "{}"),
        (Regex("[0-9]+"), "regex", "[0-9]+"),
        (Grammar('start: "a"'), "grammar", 'start: "a"'),
        (Choice(("yes", "no")), "choice", pb.Choice(texts=["yes", "no"])),
    ],
)
def test_a_constraint_is_one_of_its_kinds(constraint: Constraint, field: str, value: object) -> None:
    message = sampling_of(SamplingParams(constraint=constraint))
    assert message.WhichOneof("constraint") == field
    assert getattr(message, field) == value


@pytest.mark.parametrize(
    ("params", "path"),
    [
        (SamplingParams(n=-1), r"sampling\.n"),
        (SamplingParams(logit_bias={-1: 0.5}), r"sampling\.logit_bias"),
        (SamplingParams(min_tokens=1.5), r"sampling\.min_tokens"),  # type: ignore[arg-type]
        (SamplingParams(constraint=Choice((3,))), r"sampling\.choice\[0\]"),  # type: ignore[arg-type]
    ],
)
def test_what_no_message_holds_is_refused_by_name(params: SamplingParams, path: str) -> None:
    with pytest.raises(InvalidRequestError, match=path):
        sampling_of(params)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: wire.generate_request("a\udcffb"), "text"),
        (lambda: wire.generate_request("a", request_id="\udcff"), "request_id"),
        (lambda: wire.generate_request([ChatMessage("user", "a\udcff")]), r"chat\.messages\[0\]\.content"),
        (lambda: wire.generate_request("a", sampling=SamplingParams(stop=("\udcff",))), r"sampling\.stop\[0\]"),
        (lambda: wire.tokenize_request("\udcff"), "text"),
    ],
)
def test_what_is_no_unicode_text_is_refused_by_name(make: Callable[[], Message], path: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{path}: is no Unicode text"):
        make()


def test_tools_and_calls_travel_as_json() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        ChatMessage("user", "q"), ChatMessage("assistant", "", tool_calls=(call,)),
        ChatMessage("tool", "4", tool_call_id="c1", name="f"),
    ]  # fmt: skip
    request = wire.generate_request(messages, tools=[{"type": "function"}], priority=-3)
    assert json.loads(request.chat.tools_json) == [{"type": "function"}]
    assert json.loads(request.chat.messages[1].tool_calls_json) == [call]
    assert (request.chat.messages[0].tool_calls_json, request.chat.messages[2].tool_call_id) == ("", "c1")
    assert request.priority == -3


def test_tools_need_a_template_that_shows_them() -> None:
    with pytest.raises(InvalidRequestError, match="tools: need a chat prompt"):
        wire.generate_request("text", tools=[{"type": "function"}])


def test_logprobs_come_with_their_tokens() -> None:
    entry = logprobs_pb2.TokenLogprobs(token_id=4, logprob=-0.5, rank=2, top_token_ids=[7], top_logprobs=[-0.25])
    event = wire.event_from(pb.GenerateEvent(delta=pb.Delta(index=1, token_ids=[4], text="x", logprobs=[entry])))
    assert event == Delta(1, (4,), "x", (TokenLogprobs(4, -0.5, 2, ((7, -0.25),)),))
