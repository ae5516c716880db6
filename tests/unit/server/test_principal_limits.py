"""What one principal may take, and what it can see of others: limits, ids, cached tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from hetero_api.api_keys import Limits, Role
from hetero_api.v1 import inference_pb2
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.server.access.limits import Meter, Meters, TokenBucket
from hetero_gateway.server.access.principals import Principal
from hetero_gateway.server.calls import DETAILS_KEY
from hetero_gateway.server.errors import LimitExceeded
from tests.unit.server.server_setup import read_all, request, sampling
from tests.unit.server.test_keys import KeyedBench, ask, code_of, entry, shown, until_code, write_keys

pytestmark = pytest.mark.unit

PROMPT = list(range(20))
MODEL_INFO = inference_pb2.GetModelInfoRequest()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def meter_with(**limits: Any) -> tuple[Meter, Clock]:
    clock = Clock()
    meter = Meter("alice", clock=clock)
    meter.apply(Limits(**limits))
    return meter, clock


def test_a_bucket_is_full_at_first_and_grows_at_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(rate=2, capacity=10, clock=clock)
    assert bucket.wait_s(10) == 0
    bucket.take(16)
    assert bucket.wait_s(1) == 3.5
    clock.now_s += 3.5
    assert bucket.wait_s(1) == 0
    clock.now_s += 1000
    assert bucket.wait_s(1000) == 0  # As much as there can be.
    bucket.take(10)
    assert bucket.wait_s(10) == 5


def test_calls_a_second_may_come_at_once_and_then_one_by_one() -> None:
    meter, clock = meter_with(requests_per_second=2.0)
    for _ in range(2):
        meter.count_call()
    with pytest.raises(LimitExceeded, match="'alice' may have 2 calls a second; try again in 1 s") as caught:
        meter.count_call()
    assert caught.value.retry_after_s == 1
    clock.now_s += 0.5
    meter.count_call()


def test_every_completion_of_a_request_runs_on_its_own() -> None:
    meter, _ = meter_with(concurrent_completions=4)
    meter.begin(completions=3, prompt_tokens=5)
    with pytest.raises(LimitExceeded, match="4 completions at a time"):
        meter.begin(completions=2, prompt_tokens=5)
    meter.end(completions=3, more_tokens=0)
    with pytest.raises(InvalidRequest, match="n: must be at most 4 with this key, not 5"):
        meter.begin(completions=5, prompt_tokens=5)
    meter.begin(completions=4, prompt_tokens=5)


def test_tokens_a_minute_count_prompts_at_once_and_answers_at_their_end() -> None:
    meter, clock = meter_with(tokens_per_minute=60)
    meter.begin(completions=1, prompt_tokens=50)
    meter.end(completions=1, more_tokens=40)
    with pytest.raises(LimitExceeded, match="60 tokens a minute") as caught:
        meter.begin(completions=1, prompt_tokens=10)
    assert caught.value.retry_after_s == 40
    clock.now_s += 40
    meter.begin(completions=1, prompt_tokens=10)


def test_other_limits_begin_again_and_what_runs_still_counts() -> None:
    meters = Meters(clock=Clock())
    before = Principal("a", frozenset({Role.USER}), Limits(concurrent_completions=9))
    meters.of(before).begin(completions=2, prompt_tokens=1)
    after = Principal("a", frozenset({Role.USER}), Limits(concurrent_completions=2))
    with pytest.raises(LimitExceeded):
        meters.of(after).begin(completions=1, prompt_tokens=1)
    assert meters.of(before) is meters.of(after)


def test_a_call_under_way_brings_no_old_limits_back() -> None:
    meters = Meters(clock=Clock())
    before, after = (Principal("a", frozenset({Role.USER}), Limits(tokens_per_minute=number)) for number in (1_000, 10))
    meters.of(before).count_call()
    meters.of(after).begin(completions=1, prompt_tokens=10)
    assert meters.under_way(before).limits == after.limits
    with pytest.raises(LimitExceeded, match="10 tokens a minute"):
        meters.under_way(before).begin(completions=1, prompt_tokens=10)


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[KeyedBench]:
    async with KeyedBench(tmp_path) as bench:
        await bench.join()
        yield bench


async def hold(tenants: KeyedBench, *entries: dict[str, Any]) -> None:
    """Have these entries in force."""
    write_keys(tenants.keys_file, [*entries, entry("mark", "mark-key")])
    await until_code(tenants.inference().GetModelInfo, MODEL_INFO, shown("mark-key"), grpc.StatusCode.OK)


async def test_both_doors_refuse_a_call_too_many_and_say_when_to_come_again(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key", requestsPerSecond=0.01))
    stub = tenants.inference()
    assert await code_of(stub.GetModelInfo, MODEL_INFO, shown("a-key")) is grpc.StatusCode.OK
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModelInfo(MODEL_INFO, metadata=shown("a-key"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 90 < retry_after_s(caught.value) <= 100
    answer = await ask(tenants, "GET", "/v1/models", "a-key")
    assert answer.status_code == 429
    assert 90 < int(answer.headers["Retry-After"]) <= 100
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    # What frees resources is never refused, nor is anybody else.
    abort = inference_pb2.AbortRequest(request_id="none")
    assert await code_of(stub.Abort, abort, shown("a-key")) is grpc.StatusCode.OK
    assert await code_of(stub.GetModelInfo, MODEL_INFO, shown("mark-key")) is grpc.StatusCode.OK


def retry_after_s(error: grpc.aio.AioRpcError) -> int:
    metadata: Any = error.trailing_metadata()
    details = next(value for key, value in metadata if key == DETAILS_KEY)
    (packed,) = status_pb2.Status.FromString(details).details
    retry = error_details_pb2.RetryInfo()
    assert packed.Unpack(retry)
    return int(retry.retry_delay.seconds)


async def test_completions_count_while_they_run_however_they_end(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key", concurrentCompletions=1))
    stub, endless = tenants.inference(), sampling(ignore_eos=True)
    for _ in range(2):
        running = stub.Generate(request([1], sampling=endless), metadata=shown("a-key"))
        await running.read()
        refused = stub.Generate(request([1]), metadata=shown("a-key"))
        assert await code_of(lambda *_, call=refused, **__: call, None) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for number, status in ((1, 429), (2, 400)):
            body = {"model": "g", "prompt": "x", "n": number}
            assert (await ask(tenants, "POST", "/v1/completions", "a-key", json=body)).status_code == status
        running.cancel()
        await tenants.until(lambda: tenants.gateway.core.is_idle)
    assert len(await read_all(stub.Generate(request([1]), metadata=shown("a-key")))) > 1


async def test_tokens_of_prompt_and_answer_are_charged(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key", tokensPerMinute=30))
    stub = tenants.inference()
    asked = request(PROMPT, sampling=sampling(ignore_eos=True, max_tokens=20))
    await read_all(stub.Generate(asked, metadata=shown("a-key")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stub.Generate(request([1]), metadata=shown("a-key")))
    assert "30 tokens a minute" in str(caught.value.details())
    assert retry_after_s(caught.value) > 15


async def test_a_priority_above_the_ceiling_is_refused_and_none_is_the_ceiling(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key", minPriority=5))
    stub = tenants.inference()
    for priority, code in ((-1, "INVALID_ARGUMENT"), (4, "INVALID_ARGUMENT"), (0, "OK"), (5, "OK"), (6, "OK")):
        asked = request([1], priority=priority, sampling=sampling(max_tokens=1))
        assert (await code_of(stub.Generate, asked, shown("a-key"))).name == code, priority


async def test_nobody_sees_or_ends_requests_of_others(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key"), entry("bob", "b-key"))
    stub, endless = tenants.inference(), sampling(ignore_eos=True, max_tokens=40)
    running = stub.Generate(request([1], request_id="same", sampling=endless), metadata=shown("a-key"))
    started = await running.read()
    assert started.started.request_id == "same"
    # The id is free for others, and theirs alone.
    twin = request([1], request_id="same", sampling=sampling(max_tokens=1))
    assert await code_of(stub.Generate, twin, shown("b-key")) is grpc.StatusCode.OK
    for request_id in ("same", "alice/same"):
        abort = inference_pb2.AbortRequest(request_id=request_id)
        assert not (await stub.Abort(abort, metadata=shown("b-key"))).found
    takeover = request([1], request_id="same", received=[inference_pb2.Received(token_ids=[2])])
    takeover.sampling.CopyFrom(sampling(max_tokens=2, seed=1))
    assert await code_of(stub.Generate, takeover, shown("b-key")) is grpc.StatusCode.OK
    assert (await stub.Abort(inference_pb2.AbortRequest(request_id="same"), metadata=shown("a-key"))).found
    assert (await read_all(running))[-1].finished.reason == inference_pb2.FINISH_REASON_ABORT


async def test_cached_tokens_tell_nobody_what_others_asked(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key"), entry("bob", "b-key"))
    assert await cached(tenants, "a-key") == 0
    assert await cached(tenants, "a-key") > 0
    assert await cached(tenants, "b-key") == 0
    # No salt of one's own leads to the blocks of others.
    assert await cached(tenants, "b-key", cache_salt="alice") == 0
    assert await cached(tenants, "a-key", cache_salt="mine") == 0
    body = {"model": "g", "prompt": PROMPT, "max_tokens": 1}
    for key, hit in (("mark-key", False), ("b-key", True)):
        usage = (await ask(tenants, "POST", "/v1/completions", key, json=body)).json()["usage"]
        assert bool(usage["prompt_tokens_details"]["cached_tokens"]) is hit, key


async def cached(tenants: KeyedBench, key: str, **fields: Any) -> int:
    """The cached tokens of one and the same prompt."""
    asked = request(PROMPT, sampling=sampling(max_tokens=1), **fields)
    last = (await read_all(tenants.inference().Generate(asked, metadata=shown(key))))[-1]
    return int(last.finished.usage.cached_tokens)


async def test_embeddings_of_one_call_wait_for_one_another_within_its_limits(tenants: KeyedBench) -> None:
    limits = {"concurrentCompletions": 4, "tokensPerMinute": 40}
    await hold(tenants, entry("alice", "a-key", **limits))
    body = {"model": "g", "input": [[1, 2, 3]] * 20}
    answer = await ask(tenants, "POST", "/v1/embeddings", "a-key", json=body)
    assert (answer.status_code, len(answer.json()["data"])) == (200, 20)
    again = await ask(tenants, "POST", "/v1/embeddings", "a-key", json=body)
    assert (again.status_code, again.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_embeddings_wait_while_others_of_the_key_run(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key", concurrentCompletions=2))
    running = tenants.inference().Generate(request([1], sampling=sampling(ignore_eos=True)), metadata=shown("a-key"))
    await running.read()
    body = {"model": "g", "input": [[1, 2, 3]] * 20}
    assert (await ask(tenants, "POST", "/v1/embeddings", "a-key", json=body)).status_code == 200
    running.cancel()


async def test_prompts_of_one_call_are_within_the_limits_together(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key", concurrentCompletions=4, tokensPerMinute=60))
    # The queue takes three: the fourth is refused, and then nothing of the call counts.
    for prompts, status in ((5, 400), (4, 429), (4, 429), (3, 200), (1, 429)):
        body = {"model": "g", "prompt": [PROMPT] * prompts, "max_tokens": 1}
        answer = await ask(tenants, "POST", "/v1/completions", "a-key", json=body)
        told = answer.json().get("error", {})
        assert answer.status_code == status, told
        if prompts == 5:
            assert (told["param"], "of 5 prompts, must be at most 4" in told["message"]) == ("prompt", True)
        elif status == 429:
            assert told["code"] == ("queue_full" if prompts == 4 else "rate_limit_exceeded")
        await tenants.until(lambda: tenants.gateway.core.is_idle)


async def test_a_stream_that_is_taken_up_needs_no_second_place(tenants: KeyedBench) -> None:
    await hold(tenants, entry("alice", "a-key", concurrentCompletions=1))
    stub, endless = tenants.inference(), sampling(ignore_eos=True, max_tokens=40, seed=1)
    old = stub.Generate(request([1], request_id="r", sampling=endless), metadata=shown("a-key"))
    await old.read()
    taken_up = request([1], request_id="r", received=[inference_pb2.Received(token_ids=[2])])
    taken_up.sampling.CopyFrom(sampling(max_tokens=2, seed=1))
    assert len(await read_all(stub.Generate(taken_up, metadata=shown("a-key")))) > 1
    assert (await read_all(old))[-1].finished.reason == inference_pb2.FINISH_REASON_ABORT
