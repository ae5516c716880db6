"""The OpenAI endpoint of a real group, asked by the `openai` client; and what the other door says to the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from hetero_client import ChatMessage, SamplingParams
from tests.support.local_group import LocalGroupProcess, write_manifest

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = "Name three colours of the rainbow."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def group(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroupProcess]:
    folder = tmp_path_factory.mktemp("group")
    with LocalGroupProcess(write_manifest(folder, model=smollm2, ranks=2), home=folder / "home") as running:
        yield running


@pytest.fixture(scope="module")
def client(group: LocalGroupProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{group.record.http}/v1", api_key="none", max_retries=0) as open_client:
        yield open_client


def test_a_chat_is_answered_as_over_grpc_whole_and_streamed(group: LocalGroupProcess, client: Any) -> None:
    with group.client() as grpc_client:
        expected = grpc_client.generate_text(
            [ChatMessage("user", QUESTION)], sampling=SamplingParams(temperature=0, max_tokens=32)
        ).text
    whole = client.chat.completions.create(model="test", messages=MESSAGES, temperature=0, max_tokens=32)
    stream = client.chat.completions.create(model="test", messages=MESSAGES, temperature=0, max_tokens=32, stream=True)
    assert expected
    assert whole.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_seeds_and_several_completions_are_reproducible(client: Any) -> None:
    asked = {"model": "test", "prompt": "Once upon a time", "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    first, second = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    alone = client.completions.create(**(asked | {"n": 1}))
    assert alone.choices[0].text == texts[0]


def test_answers_are_bound_to_a_json_schema(client: Any) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "Describe a pet."}],
            response_format=response_format,
            max_tokens=120,
            seed=seed,
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_log_probabilities_tell_the_token_that_was_taken_and_its_rivals(client: Any) -> None:
    answer = client.chat.completions.create(
        model="test", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    positions = answer.choices[0].logprobs.content
    assert "".join(position.token for position in positions) == answer.choices[0].message.content
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].token == position.token
        assert position.logprob == max(rival.logprob for rival in position.top_logprobs) <= 0


def test_an_echoed_prompt_comes_with_its_own_log_probabilities(client: Any) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model="test", prompt=prompt, temperature=0, max_tokens=2, logprobs=2, echo=True
    ).choices[0]
    assert answer.text.startswith(prompt)
    assert answer.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in answer.logprobs.token_logprobs[1:])
    assert "".join(answer.logprobs.tokens) == answer.text
