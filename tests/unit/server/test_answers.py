"""Long answers: their text in pieces, tokens in several chunks, and what they may repeat of prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import ranks_pb2
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.server.openai import answers
from hetero_gateway.server.openai.answers import MANY_POSITIONS, ChatFormatter, CompletionFormatter, Position, answer_of
from hetero_gateway.server.openai.call import MAX_ECHOED, Call, Part, check_echo

pytestmark = pytest.mark.unit


SCORING = ranks_pb2.Sampling(num_logprobs=2, num_prompt_logprobs=2)
EOS = 5


class Stream:
    """Events of a request that has ended."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def cancel(self) -> None:
        """There is nothing to end."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for event in self._events:
            yield event


def position(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-1.5, top_token_ids=[7, 8], top_logprobs=[-0.5, -0.25])


def call_of(formatter: type[Any], num_tokens: int, *, num_prompt: int = 2, n: int = 1, echo: bool = False) -> Call:
    prompt = tuple(range(10, 10 + num_prompt))
    delta = [
        pb.Delta(index=index, token_ids=range(num_tokens), text="text", logprobs=map(position, range(num_tokens)))
        for index in range(n)
    ]
    ends = [pb.Finished(index=index, reason=pb.FINISH_REASON_STOP) for index in range(n)]
    stream: Any = Stream([pb.PromptLogprobs(positions=map(position, prompt[1:])), *delta, *ends])
    asked = GenerationRequest(request_id="r", prompt_token_ids=prompt, sampling=SCORING, n=n)
    part = Part(asked, stream, first_choice=0, eos_token_ids=frozenset())
    form = formatter("r", "m", lambda token_id: b"%03d" % token_id, True)
    return Call([part], formatter=form, echo=(lambda tokens: "p" * len(tokens)) if echo else None)


async def chunks_of(call: Call) -> list[Any]:
    return [chunk["choices"][0] async for chunk in call.chunks(usage_at_end=False, usage_in_all=False)]


async def test_offsets_go_on_from_chunk_to_chunk() -> None:
    chunks = await chunks_of(call_of(CompletionFormatter, 3, n=2, echo=True))
    for index in range(2):
        offsets = [
            chunk["logprobs"]["text_offset"] for chunk in chunks if chunk["index"] == index and chunk["logprobs"]
        ]
        assert offsets == [[0, 3], [6, 9, 12]]


def scored(sampling: ranks_pb2.Sampling, *, num_prompt: int) -> Call:
    """An echoed prompt, and a completion of the token that ends it."""
    prompt = tuple(range(10, 10 + num_prompt))
    events: list[Any] = [pb.Delta(index=0, token_ids=[EOS]), pb.Finished(reason=pb.FINISH_REASON_STOP)]
    if sampling.HasField("num_prompt_logprobs"):
        events[0].logprobs.append(position(EOS))
        events.insert(0, pb.PromptLogprobs(positions=map(position, prompt[1:])))
    stream: Any = Stream(events)
    asked = GenerationRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling)
    part = Part(asked, stream, first_choice=0, eos_token_ids=frozenset({EOS}))
    form = CompletionFormatter("r", "m", lambda token_id: b"%03d" % token_id, bool(sampling.num_logprobs), {EOS})
    return Call([part], formatter=form, echo=lambda tokens: "ppp" * len(tokens))


async def test_the_token_that_ends_a_completion_has_its_position_and_no_text() -> None:
    answer = json.loads(bytes((await scored(SCORING, num_prompt=4).whole()).body))["choices"][0]
    assert answer["text"] == "p" * 12
    shown = answer["logprobs"]
    assert shown["tokens"] == ["010", "011", "012", "013", "005"]
    assert shown["token_logprobs"] == [None, -1.5, -1.5, -1.5, -1.5]
    assert shown["text_offset"] == [0, 3, 6, 9, 12]


async def test_an_echo_without_log_probabilities_is_one_chunk() -> None:
    chunks = await chunks_of(scored(ranks_pb2.Sampling(), num_prompt=10 * MANY_POSITIONS))
    assert [bool(chunk["text"]) for chunk in chunks if chunk["finish_reason"] is None] == [True]


def test_offsets_count_the_characters_of_the_text() -> None:
    tokens = {1: b"<s>", 2: "é".encode(), 3: b"\xf0\x9f", 4: b"\x99\x82", 5: b"a"}
    form = CompletionFormatter("r", "m", tokens.__getitem__, True, {1})
    shown = form.logprobs(0, [Position(token, None) for token in tokens])
    assert shown["text_offset"] == [0, 0, 1, 2, 2]  # of "é🙂a"
    assert shown["tokens"] == ["<s>", "é", r"bytes:\xf0\x9f", r"bytes:\x99\x82", "a"]
    top = TokenLogprobs(token_id=3, logprob=-3.0, top_token_ids=[4], top_logprobs=[-0.5])
    (listed,) = form.logprobs(0, [Position(3, top)])["top_logprobs"]
    assert listed == {r"bytes:\xf0\x9f": -3.0, r"bytes:\x99\x82": -0.5}


@pytest.mark.parametrize("formatter", [ChatFormatter, CompletionFormatter])
async def test_many_tokens_come_in_several_chunks(formatter: type[Any]) -> None:
    number = 3 * MANY_POSITIONS + 1
    whole = json.loads(bytes((await call_of(formatter, number).whole()).body))["choices"][0]
    chunks = await chunks_of(call_of(formatter, number))
    with_tokens = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    assert len(with_tokens) == 4
    for name, expected in whole["logprobs"].items():
        if isinstance(expected, list):
            assert [each for chunk in with_tokens for each in chunk[name]] == expected, name
    texts = [chunk["text"] if "text" in chunk else chunk["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "text"


async def test_a_long_answer_is_made_in_a_thread_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, threads, longest = answers._encode, set(), 0

    def counted(value: Any) -> str:
        nonlocal longest
        threads.add(threading.current_thread())
        text: str = encode(value)
        longest = max(longest, len(text))
        return text

    monkeypatch.setattr(answers, "_encode", counted)
    for number, is_long in ((MANY_POSITIONS, False), (100 * MANY_POSITIONS, True)):
        for formatter in (ChatFormatter, CompletionFormatter):
            threads.clear()
            text = (await call_of(formatter, number, n=1).whole()).body
            assert (threads != {threading.main_thread()}) is is_long
            assert not is_long or longest < len(text) / 50
            longest = 0


JSON: dict[str, Any] = {
    "a": [], "b": {}, "c": [[1, 2], [3]], "d": [{"x": [{"y": {"z": [{"deep": [1]}]}}]}, {}], "e": [None, {"x": 1}],
    "f": "ü\n", "g": [0.1] * 1000, "h": None, "i": [{"embedding": [0.5] * 200}] * 3,
}  # fmt: skip


async def test_pieces_make_the_text_that_the_encoder_makes() -> None:
    many, few = [(await answer_of(lambda: JSON, num_numbers=number)).body for number in (10**6, 1)]
    assert many == few
    assert json.loads(bytes(many)) == JSON
    assert (await answer_of(dict, num_numbers=10**6)).body == b"{}"


def asked(num_prompt: int, *, n: int, logprobs: int | None) -> GenerationRequest:
    sampling = ranks_pb2.Sampling(num_prompt_logprobs=logprobs)
    return GenerationRequest(request_id="r", prompt_token_ids=(1,) * num_prompt, sampling=sampling, n=n)


def test_what_a_call_repeats_of_its_prompts_is_bounded() -> None:
    check_echo([asked(MAX_ECHOED // 32, n=16, logprobs=1), asked(MAX_ECHOED, n=16, logprobs=None)])
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ECHOED}"):
        check_echo([asked(MAX_ECHOED // 32, n=16, logprobs=1), asked(1, n=1, logprobs=0)])
