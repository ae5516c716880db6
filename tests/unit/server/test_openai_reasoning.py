"""Answers with reasoning, whole and streamed, and reasoning that comes back with a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import ranks_pb2
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine import stream as stream_module
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.stream import ReaderTurns, RequestStream
from hetero_gateway.engine.text.answer_formats import FORMATS, AnswerFormat
from hetero_gateway.engine.text.answer_parser import AnswerParser, Reasoning
from hetero_gateway.server.errors import InvalidArguments
from hetero_gateway.server.openai.answers import ChatFormatter, CompletionFormatter, ResponseFormatter
from hetero_gateway.server.openai.call import Call, Part
from hetero_gateway.server.openai.requests import chat_requests
from hetero_gateway.server.openai.schema import ChatBody
from hetero_gateway.server.reading import template_message
from hetero_gateway.server.validation import check_generate
from tests.unit.engine.test_channels import ANALYSIS, CALL, FINAL, PROMPT, TOKENIZER

pytestmark = pytest.mark.unit

THOUGHT, SAID = "The user greets. 你好", "Hello! 🙂"


def call_of(
    answer: str,
    formatter: type[ResponseFormatter] = ChatFormatter,
    new_parser: Callable[[], AnswerParser] | None = None,
) -> Call:
    """A call whose one completion has been generated, a token at a time; its reader is far behind."""
    prompt = tuple(TOKENIZER.encode(PROMPT))
    asked = GenerationRequest(request_id="id", prompt_token_ids=prompt, sampling=ranks_pb2.Sampling())
    stream = RequestStream(
        "id",
        num_prompt_tokens=len(prompt),
        detokenizers=[TOKENIZER.detokenizer((), prompt)],
        cancel=lambda _: None,
        turns=ReaderTurns(),
    )
    (feed,) = stream.feeds
    for token in TOKENIZER.encode(answer):
        feed.push(token, None)
    feed.close()
    feed.end(pb.Finished(index=0, reason=pb.FINISH_REASON_STOP))
    part = Part(asked, stream, first_choice=0, eos_token_ids=frozenset(), new_parser=new_parser)
    return Call([part], formatter=formatter("id", "m", TOKENIZER.token_bytes, False))


async def test_a_whole_chat_has_its_reasoning_apart() -> None:
    (choice,) = json.loads(bytes((await call_of(ANALYSIS + FINAL).whole()).body))["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "refusal": None,
    }  # fmt: skip
    assert choice["finish_reason"] == "stop"


async def test_a_chat_without_reasoning_has_no_such_field() -> None:
    (choice,) = json.loads(bytes((await call_of("<|channel|>final<|message|>Hello!<|return|>").whole()).body))[
        "choices"
    ]
    assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}


async def test_a_streamed_chat_tells_reasoning_and_text_in_fields_of_their_own() -> None:
    chunks = [chunk async for chunk in call_of(ANALYSIS + FINAL).chunks(usage_at_end=False, usage_in_all=False)]
    deltas: list[dict[str, Any]] = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == SAID


async def test_calls_of_gpt_oss_are_read_from_its_channels() -> None:
    form = AnswerFormat(FORMATS["GptOss"], None)
    calling = ANALYSIS + CALL.removesuffix("<|call|>") + CALL.replace("look", "see")
    make: Any = lambda: AnswerParser(form, tools={"look": {}, "see": {}})  # noqa: E731 - one for each call
    (choice,) = json.loads(bytes((await call_of(calling, new_parser=make).whole()).body))["choices"]
    stream = call_of(calling, new_parser=make).chunks(usage_at_end=False, usage_in_all=False)
    deltas = [chunk["choices"][0]["delta"] async for chunk in stream]
    starts = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, THOUGHT)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "look", "arguments": '{"at": 1}'}, {"name": "see", "arguments": '{"at": 1}'}]
    assert [(call["index"], call["function"]["name"]) for call in starts] == [(0, "look"), (1, "see")]
    assert choice["finish_reason"] == "tool_calls"


async def test_reasoning_alone_is_a_chunk_without_content() -> None:
    formatter = ChatFormatter("id", "m", TOKENIZER.token_bytes, False)
    chunk = formatter.delta(0, Reasoning("Hm"), [])
    assert chunk["choices"][0]["delta"] == {"reasoning_content": "Hm"}


async def test_a_completion_has_the_reasoning_as_text() -> None:
    (choice,) = json.loads(bytes((await call_of(ANALYSIS + FINAL, CompletionFormatter).whole()).body))["choices"]
    assert choice["text"] == THOUGHT + SAID


def chat_body(*messages: dict[str, Any]) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": list(messages)})


def test_reasoning_of_earlier_answers_reaches_the_template() -> None:
    body = chat_body({"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "reasoning_content": "b"})
    (request,) = chat_requests(body, "id")
    assert template_message(request.chat.messages[1]) == {
        "role": "assistant", "content": "a", "reasoning_content": "b", "thinking": "b",
    }  # fmt: skip


def test_of_a_call_with_a_text_the_template_gets_one_of_both() -> None:
    message = pb.ChatMessage(role="assistant", content="a", reasoning="b", tool_calls_json="[{}]")
    assert "thinking" not in template_message(message)


def test_only_an_assistant_has_reasoning() -> None:
    (request,) = chat_requests(chat_body({"role": "user", "content": "hi", "reasoning_content": "b"}), "id")
    with pytest.raises(InvalidArguments, match="reasoning"):
        check_generate(request, vocab_size=300, max_model_len=64)


@pytest.mark.parametrize("stop", [(), ("no such text",)])
async def test_a_reader_that_is_far_behind_gets_events_of_bounded_size(
    stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "TOKENS_AN_EVENT", 4)
    stream = RequestStream(
        "id",
        num_prompt_tokens=1,
        detokenizers=[TOKENIZER.detokenizer(stop)],
        cancel=lambda _: None,
        turns=ReaderTurns(),
    )
    (feed,) = stream.feeds
    tokens = TOKENIZER.encode("The quick brown fox jumps over the lazy dog")
    for token in tokens:
        feed.push(token, TokenLogprobs(token_id=token))
    feed.close()
    feed.end(pb.Finished(index=0, reason=pb.FINISH_REASON_STOP))
    events = [event async for event in stream]
    assert isinstance(events.pop(), pb.Finished)
    deltas = [event for event in events if isinstance(event, pb.Delta)]
    assert len(deltas) == len(events)
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    for delta in deltas[:-1]:
        assert delta.text == TOKENIZER.decode(delta.token_ids), "text goes with its tokens"
        assert [each.token_id for each in delta.logprobs] == list(delta.token_ids)
        assert len(delta.token_ids) == 4
    assert "".join(delta.text for delta in deltas) == TOKENIZER.decode(tokens)
