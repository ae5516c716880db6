"""Every bound that inference.proto states: the status, the field, and what the message says."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.server import validation
from hetero_gateway.server.errors import InvalidArguments, Violation
from tests.unit.server.server_setup import GatewayBench, read_all, request, sampling

pytestmark = pytest.mark.unit


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    made = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=made))


def with_sampling(**fields: Any) -> pb.GenerateRequest:
    return request("hello", sampling=sampling(**fields))


def resumed(received: list[list[int]], **fields: Any) -> pb.GenerateRequest:
    defaults: dict[str, Any] = {"request_id": "mine", "sampling": sampling(seed=1, max_tokens=9)}
    came = [pb.Received(token_ids=token_ids) for token_ids in received]
    return request([5], received=came, **(defaults | fields))


def spoken(*, tools_json: str = "", **fields: Any) -> pb.GenerateRequest:
    """A conversation of one message."""
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(**fields)], tools_json=tools_json))


def nested(levels: int) -> str:
    """An array of one object, so many levels deep."""
    return '[{"a":' + "[" * (levels - 2) + "]" * (levels - 2) + "}]"


BAD: list[tuple[pb.GenerateRequest, str, str]] = [
    (request("a", request_id="x" * 129), "request_id", "at most 128 characters, not 129"),
    (request("a", request_id="€"), "request_id", "must be printable ASCII, not '€'"),
    (request("a", request_id="a\r\nb"), "request_id", "must be printable ASCII"),
    (request("a", cache_salt="x" * 1025), "cache_salt", "at most 1024 characters, not 1025"),
    (pb.GenerateRequest(), "prompt", "is missing"),
    (request(""), "text", "is empty"),
    (request([]), "token_ids.ids", "is empty"),
    (request([0, 258]), "token_ids.ids[1]", "must be in the vocabulary [0, 258), not 258"),
    (chat(), "chat.messages", "is empty"),
    (chat(("user", "a"), ("robot", "b")), "chat.messages[1].role", "system, user, assistant, tool, not 'robot'"),
    (request([1] * 64), "prompt", "has 64 tokens; with at least one to generate the model's length of 64 allows 63"),
    (request("x" * 100), "prompt", "has 100 tokens"),
    (request("x" * 316), "prompt", "has 316 bytes; tokens of this model have at most 5, "),
    (chat(("user", "x" * 300)), "prompt", "has 317 bytes; "),
    (chat(*[("user", "x")] * 4097), "chat.messages", "at most 4096 messages, not 4097"),
    (chat(*[("user", "x")] * 200_000), "request", "too many parts; at most 100000 are allowed"),
    (request([1] * 5_000_000), "ids", "at most 2097152 bytes in protobuf's encoding, not 5000000"),
    (resumed([[5] * 65]), "received[0].token_ids", "has 65 tokens, the model's length is 64"),
    (with_sampling(temperature=-1), "sampling.temperature", "must be between 0 and 100, not -1"),
    (with_sampling(temperature=100.5), "sampling.temperature", "must be between 0 and 100, not 100.5"),
    (with_sampling(temperature=math.nan), "sampling.temperature", "must be between 0 and 100, not nan"),
    (with_sampling(top_p=0), "sampling.top_p", "more than 0 and at most 1, not 0"),
    (with_sampling(top_p=1.5), "sampling.top_p", "more than 0 and at most 1, not 1.5"),
    (with_sampling(top_p=math.nan), "sampling.top_p", "more than 0 and at most 1, not nan"),
    (with_sampling(min_p=-0.5), "sampling.min_p", "between 0 and 1, not -0.5"),
    (with_sampling(min_p=2), "sampling.min_p", "between 0 and 1, not 2"),
    (with_sampling(max_tokens=0), "sampling.max_tokens", "at least 1, not 0"),
    (with_sampling(stop=["a", ""]), "sampling.stop[1]", "is empty"),
    (with_sampling(stop=["a"] * 17), "sampling.stop", "at most 16 strings, not 17"),
    (with_sampling(stop=["a", "b" * 257]), "sampling.stop[1]", "at most 256 characters, not 257"),
    (with_sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "at most 64 ids, not 65"),
    (with_sampling(stop_token_ids=[300]), "sampling.stop_token_ids[0]", "vocabulary [0, 258), not 300"),
    (with_sampling(presence_penalty=2.5), "sampling.presence_penalty", "between -2 and 2, not 2.5"),
    (with_sampling(presence_penalty=math.nan), "sampling.presence_penalty", "between -2 and 2, not nan"),
    (with_sampling(frequency_penalty=-3), "sampling.frequency_penalty", "between -2 and 2, not -3"),
    (with_sampling(repetition_penalty=0.001), "sampling.repetition_penalty", "between 0.01 and 10, not 0.001"),
    (with_sampling(repetition_penalty=math.nan), "sampling.repetition_penalty", "between 0.01 and 10, not nan"),
    (with_sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "sampling.logit_bias", "at most 300 tokens, not 301"),
    (with_sampling(logit_bias={258: 1.0}), "sampling.logit_bias[258]", "vocabulary [0, 258), not 258"),
    (with_sampling(logit_bias={5: 101.0}), "sampling.logit_bias[5]", "between -100 and 100, not 101"),
    (with_sampling(logit_bias={5: math.inf}), "sampling.logit_bias[5]", "between -100 and 100, not inf"),
    (with_sampling(max_tokens=4, min_tokens=5), "sampling.min_tokens", "at most max_tokens, 4, not 5"),
    (with_sampling(n=0), "sampling.n", "between 1 and 16, not 0"),
    (with_sampling(n=17), "sampling.n", "between 1 and 16, not 17"),
    (with_sampling(logprobs=21), "sampling.logprobs", "between 0 and 20, not 21"),
    (with_sampling(prompt_logprobs=21), "sampling.prompt_logprobs", "between 0 and 20, not 21"),
    (with_sampling(choice=pb.Choice()), "sampling.choice.texts", "between 1 and 256 texts, not 0"),
    (with_sampling(choice=pb.Choice(texts=["a"] * 257)), "sampling.choice.texts", "between 1 and 256 texts, not 257"),
    (with_sampling(choice=pb.Choice(texts=["a", ""])), "sampling.choice.texts[1]", "is empty"),
    (with_sampling(regex="a", ignore_eos=True), "sampling.ignore_eos", "cannot be set with regex"),
    (with_sampling(regex="a", min_tokens=2), "sampling.min_tokens", "cannot be set with regex"),
    (with_sampling(json_schema="{"), "sampling.json_schema", "is no JSON"),
    (with_sampling(grammar="start: foo"), "sampling.grammar", "unknown name"),
    (request("a", priority=101), "priority", "between -100 and 100, not 101"),
    (request("a", priority=-101), "priority", "between -100 and 100, not -101"),
    (resumed([[5]], request_id=""), "request_id", "as Started reported it"),
    (resumed([[5]], sampling=sampling()), "sampling.seed", "as Started reported it"),
    (resumed([[5], [6]]), "received", "at most 1 completions (sampling.n), not 2"),
    (resumed([[5, 258]]), "received[0].token_ids[1]", "vocabulary [0, 258), not 258"),
    (resumed([[256, 5]]), "received[0].token_ids", "goes on behind a token that ends"),
    (spoken(role="user", tool_calls_json="[]"), "chat.messages[0].tool_calls_json", "of the assistant only"),
    (spoken(role="assistant", tool_calls_json="["), "chat.messages[0].tool_calls_json", "is no JSON"),
    (spoken(role="assistant", tool_calls_json="{}"), "chat.messages[0].tool_calls_json", "a JSON array of objects"),
    (spoken(role="user", tool_call_id="c"), "chat.messages[0].tool_call_id", "in a tool's message only"),
    (spoken(role="user", tools_json="[1]"), "chat.tools_json", "must be a JSON array of objects, not '[1]'"),
    (spoken(role="user", tools_json=nested(65)), "chat.tools_json", "at most 64 levels deep"),
    (spoken(role="user", tools_json=nested(100_000)), "chat.tools_json", "at most 64 levels deep"),
    (spoken(role="user", tools_json=f"[{' ' * (1 << 20)}]"), "chat.tools_json", "at most 1048576 characters"),
    (request("a", output_mode=9), "output_mode", "must be OUTPUT_MODE_DELTA or OUTPUT_MODE_FINAL_ONLY, not 9"),
]

EDGES = [
    request("a", request_id="x" * 128, sampling=sampling(max_tokens=1)),
    request([0, 257], sampling=sampling(max_tokens=1)),
    request([1] * 63),
    with_sampling(temperature=0, max_tokens=1),
    with_sampling(temperature=100, top_p=1, min_p=1, max_tokens=1),
    with_sampling(presence_penalty=-2, frequency_penalty=2, repetition_penalty=10, max_tokens=1),
    with_sampling(logit_bias=dict.fromkeys(range(258), -100.0), max_tokens=1),
    with_sampling(n=16, max_tokens=1, min_tokens=1, logprobs=20, prompt_logprobs=20),
    with_sampling(choice=pb.Choice(texts=[f"{number}" for number in range(256)])),
    request("a", priority=100, sampling=sampling(max_tokens=1)),
    request("a", priority=-100, sampling=sampling(max_tokens=1)),
    resumed([], request_id=""),
    resumed([[]], sampling=sampling(temperature=0, max_tokens=1)),
    resumed([[5] * 9]),
    with_sampling(top_k=2**32 - 1, seed=2**64 - 1, max_tokens=1),
    with_sampling(max_tokens=2**32 - 1),
    spoken(role="user", content="a", tools_json=nested(64)),
    request("a", request_id="".join(map(chr, range(32, 127))), cache_salt="x" * 1024, sampling=sampling(max_tokens=1)),
    with_sampling(stop=["a" * 256] * 16, stop_token_ids=[257] * 64, max_tokens=1),
]


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    status = rpc_status.from_call(error)
    assert status is not None
    details = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(details)
    return {violation.field: violation.description for violation in details.field_violations}


@pytest.mark.parametrize(("bad", "field", "words"), BAD, ids=[f"{case[1]}-{case[2][:24]}" for case in BAD])
async def test_a_bound_that_is_broken_is_named(
    ready: GatewayBench, bad: pb.GenerateRequest, field: str, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(bad))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(caught.value.details())
    assert str(caught.value.details()).startswith(f"{field}: ")
    assert words in violations(caught.value)[field]


@pytest.mark.parametrize("edge", EDGES, ids=range(len(EDGES)))
async def test_what_is_just_within_the_bounds_is_served(ready: GatewayBench, edge: pb.GenerateRequest) -> None:
    assert (await read_all(ready.inference().Generate(edge)))[-1].HasField("finished")


async def test_all_violations_are_told_at_once(ready: GatewayBench) -> None:
    bad = pb.GenerateRequest(sampling=sampling(temperature=-1, top_p=2), output_mode=5)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(bad))
    assert set(violations(caught.value)) == {"prompt", "sampling.temperature", "sampling.top_p", "output_mode"}


async def test_a_long_field_does_not_blow_up_the_status(ready: GatewayBench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(chat(*[("r" * 100_000, "x")] * 50)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(str(caught.value.details())) <= 1500


async def test_many_violations_cost_no_more_than_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(field: str, problem: str) -> Violation:
        nonlocal made
        made += 1
        return Violation(field, problem)

    bad = chat(*[("robot", "")] * 4096)
    monkeypatch.setattr(validation, "Violation", counted)
    with pytest.raises(InvalidArguments) as caught:
        validation.check_generate(bad, vocab_size=258, max_model_len=64)
    assert len(caught.value.violations) == made == 8


async def test_a_message_over_the_limit_is_refused(ready: GatewayBench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(request("x" * (8 * 1024 * 1024))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("method", "bad", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "input"),
        ("Tokenize", pb.TokenizeRequest(chat=pb.ChatMessages()), "chat.messages"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 258]), "token_ids[1]"),
        ("Abort", pb.AbortRequest(), "request_id"),
        ("Abort", pb.AbortRequest(request_id="x" * 129), "request_id"),
    ],
)
async def test_the_other_calls_name_their_fields_too(bench: GatewayBench, method: str, bad: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(bench.inference(), method)(bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations(caught.value)) == {field}
