"""Generate, from a client's side: events, ends, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from hetero_api.model_directory import ModelSource, write_source
from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_gateway.engine.request import derived_seed
from hetero_gateway.engine.stream import StreamEvent
from hetero_gateway.server import inference
from hetero_gateway.server.access.intake import Intake
from hetero_gateway.server.access.limits import Meters
from hetero_gateway.server.calls import InFlight
from hetero_gateway.server.config import read_model
from hetero_gateway.server.inference import InferenceServicer, merged
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.reading import RequestReader
from tests.unit.engine.fake_ranks import tokens_alone
from tests.unit.server.server_setup import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    GatewayBench,
    read_all,
    request,
    sampling,
    served_model,
    write_manifest,
    write_model,
)

pytestmark = pytest.mark.unit

ENDLESS = {"ignore_eos": True, "max_tokens": 50, "seed": 3}


def expected(prompt: list[int], *, seed: int, count: int) -> list[int]:
    return tokens_alone(prompt, seed=seed, count=count, vocab_size=VOCAB_SIZE)


async def until_delta(call: Any) -> None:
    while not (await call.read()).HasField("delta"):
        pass


async def test_a_stream_is_started_deltas_and_one_finished(ready: GatewayBench) -> None:
    asked = request([5, 6, 7], request_id="mine", sampling=sampling(seed=9, max_tokens=8, ignore_eos=True))
    events = await read_all(ready.inference().Generate(asked))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(events) - 2), "finished"]
    assert events[0].started == pb.Started(request_id="mine", prompt_tokens=3, seed=9)
    tokens = [token for event in events[1:-1] for token in event.delta.token_ids]
    assert tokens == expected([5, 6, 7], seed=9, count=8)
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.usage == pb.Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=8)
    assert finished.WhichOneof("matched_stop") is None
    total, first = finished.timings.total.ToTimedelta(), finished.timings.first_token.ToTimedelta()
    assert total >= first > finished.timings.queued.ToTimedelta()


async def test_final_only_sends_everything_in_one_delta(ready: GatewayBench) -> None:
    asked = request([5], sampling=sampling(**ENDLESS), output_mode=pb.OUTPUT_MODE_FINAL_ONLY)
    events = await read_all(ready.inference().Generate(asked))
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "finished"]
    assert list(events[1].delta.token_ids) == expected([5], seed=3, count=50)


async def test_an_id_and_a_seed_are_drawn_when_absent_and_told(ready: GatewayBench) -> None:
    stub = ready.inference()
    runs = [await read_all(stub.Generate(request(sampling=sampling(max_tokens=1)))) for _ in range(2)]
    first, second = (run[0].started for run in runs)
    assert len({first.request_id, second.request_id, ""}) == 3
    assert first.seed != second.seed
    assert max(first.seed, second.seed) < 2**63


async def test_text_and_chat_become_the_tokens_that_tokenize_tells(ready: GatewayBench) -> None:
    stub = ready.inference()
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="héllo")])
    text = await stub.Tokenize(pb.TokenizeRequest(text="[user]héllo[assistant]"))
    rendered = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert text == rendered
    events = await read_all(stub.Generate(pb.GenerateRequest(chat=chat, sampling=sampling(seed=1, max_tokens=1))))
    assert events[0].started.prompt_tokens == len(text.token_ids)
    assert list(events[1].delta.token_ids) == expected(list(text.token_ids), seed=1, count=1)
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=text.token_ids))
    assert back.text == "[user]héllo[assistant]"
    assert (await stub.Tokenize(pb.TokenizeRequest(text=""))).token_ids == []


async def test_a_stop_token_and_a_prefix_hit_are_told(ready: GatewayBench) -> None:
    stub = ready.inference()
    prompt = list(range(10, 30))
    stop = expected(prompt, seed=2, count=3)[-1]
    asked = request(prompt, sampling=sampling(seed=2, stop_token_ids=[stop], ignore_eos=True))
    finished = (await read_all(stub.Generate(asked)))[-1].finished
    assert (finished.reason, finished.stop_token_id) == (pb.FINISH_REASON_STOP, stop)
    again = (await read_all(stub.Generate(asked)))[-1].finished
    assert again.usage.cached_tokens == 16
    asked.cache_salt = "another tenant"
    assert (await read_all(stub.Generate(asked)))[-1].finished.usage.cached_tokens == 0


async def test_cancelling_frees_the_blocks_at_once(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    call = bench.inference().Generate(request([1] * 20, sampling=sampling(**ENDLESS)))
    core, num_plans = bench.gateway.core, rank.num_plans
    await bench.until(lambda: rank.num_plans == num_plans + 1)
    assert core.stats().used_blocks > 0
    call.cancel()
    await bench.until(lambda: core.stats().used_blocks == 0)
    rank.may_step.set()
    # Ranks are told of it, and compute no more: a step that was out, and one that only drops the slot.
    await asyncio.wait_for(core.wait_idle(), 5)
    async with core.hold():
        assert rank.num_plans <= num_plans + 3


async def test_abort_ends_the_stream_with_finished(bench: GatewayBench) -> None:
    await bench.join()
    stub = bench.inference()
    call = stub.Generate(request([1], request_id="long", sampling=sampling(seed=1, ignore_eos=True)))
    await until_delta(call)
    assert (await stub.Abort(pb.AbortRequest(request_id="long"))).found
    assert (await read_all(call))[-1].finished.reason == pb.FINISH_REASON_ABORT
    assert not (await stub.Abort(pb.AbortRequest(request_id="long"))).found


async def test_a_deadline_ends_the_request(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(bench.inference().Generate(request(), timeout=0.2))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    rank.may_step.set()
    await bench.until(lambda: bench.gateway.core.stats().used_blocks == 0)
    assert bench.gateway.core.stats().running_requests == 0


@pytest.mark.parametrize("timeout_s", [0, -1, 1e-9])
async def test_a_deadline_that_has_passed_ends_the_call(ready: GatewayBench, timeout_s: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(request(), timeout=timeout_s))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await ready.until(lambda: ready.gateway.core.stats().used_blocks == 0)


class ExpiredContext:
    """A call that reached the server after its deadline; a real client ends such a call on its own side."""

    def __init__(self) -> None:
        self.ended: tuple[grpc.StatusCode, str] | None = None

    def time_remaining(self) -> float:
        return 0.0

    def add_done_callback(self, callback: Any) -> None:
        """The call is never over."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        self.ended = (code, details)
        raise grpc.aio.AbortError


async def test_a_call_that_arrives_after_its_deadline_computes_nothing(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    num_plans = rank.num_plans
    context: Any = ExpiredContext()
    servicer = InferenceServicer(
        Intake(bench.gateway.core, Meters()),
        reader=RequestReader(bench.model),
        in_flight=InFlight(),
        model_info=bench.model.info,
        server_info=pb.GetServerInfoResponse,
        metrics=GatewayMetrics(),
    )
    with pytest.raises(grpc.aio.AbortError):
        [event async for event in servicer.Generate(request().SerializeToString(), context)]
    assert context.ended == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the call's deadline had passed when it arrived; give it more time",
    )
    assert rank.num_plans == num_plans


async def test_an_id_in_flight_is_refused_and_the_first_stream_goes_on(bench: GatewayBench) -> None:
    await bench.join()
    stub = bench.inference()
    first = stub.Generate(request([1], request_id="same", sampling=sampling(**ENDLESS)))
    await until_delta(first)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stub.Generate(request([2], request_id="same")))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "request_id" in str(caught.value.details())
    assert (await read_all(first))[-1].HasField("finished")
    again = stub.Generate(request([1], request_id="same", sampling=sampling(max_tokens=1)))
    assert (await read_all(again))[-1].HasField("finished")


async def test_a_full_queue_says_when_to_come_back(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    stub = bench.inference()
    # Two run, one waits.
    calls = [stub.Generate(request([i], sampling=sampling(max_tokens=1))) for i in range(3)]
    await asyncio.gather(*(call.read() for call in calls))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stub.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(caught.value)
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 1
    rank.may_step.set()
    for call in calls:
        assert (await read_all(call))[-1].HasField("finished")


async def test_without_a_group_requests_are_unavailable_and_tokenize_works(bench: GatewayBench) -> None:
    stub = bench.inference()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stub.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids


async def test_a_lost_rank_pauses_streams_and_the_next_epoch_finishes_them(bench: GatewayBench) -> None:
    rank, life = await bench.join()
    stub = bench.inference()
    calls = [stub.Generate(request([i], sampling=sampling(**ENDLESS))) for i in range(2)]
    events = [[await call.read() for _ in range(3)] for call in calls]
    rank.may_step.clear()
    life.cancel()
    await bench.until(lambda: not bench.gateway.group.is_ready)
    assert bench.gateway.core.paused_requests == 2
    await bench.join()
    for number, (call, begun) in enumerate(zip(calls, events, strict=True)):
        whole = [*begun, *await read_all(call)]
        tokens = [token for event in whole for token in event.delta.token_ids]
        assert tokens == expected([number], seed=3, count=50)
        assert whole[-1].finished.usage.completion_tokens == 50
    assert bench.gateway.core.recoveries == 1


async def test_a_restarted_clients_call_takes_its_stream_up_where_it_left_it(ready: GatewayBench) -> None:
    stub = ready.inference()
    asked = request([5], request_id="mine", sampling=sampling(**ENDLESS))
    whole = expected([5], seed=3, count=50)
    old = stub.Generate(asked)
    await until_delta(old)
    asked.received.add(token_ids=whole[:20])
    events = await read_all(stub.Generate(asked))
    assert [token for event in events for token in event.delta.token_ids] == whole[20:]
    assert events[-1].finished.usage.completion_tokens == 50
    assert (await read_all(old))[-1].finished.reason in (pb.FINISH_REASON_ABORT, pb.FINISH_REASON_LENGTH)


async def test_several_completions_each_have_an_index_an_end_and_usage(ready: GatewayBench) -> None:
    asked = request([5, 6], sampling=sampling(n=3, max_tokens=6, seed=3, ignore_eos=True))
    for mode in (pb.OUTPUT_MODE_DELTA, pb.OUTPUT_MODE_FINAL_ONLY):
        asked.output_mode = mode
        events = await read_all(ready.inference().Generate(asked))
        ends = {event.finished.index: event.finished for event in events if event.HasField("finished")}
        assert sorted(ends) == [0, 1, 2]
        for index in range(3):
            deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == expected([5, 6], seed=derived_seed(3, index), count=6)
            assert ends[index].usage.completion_tokens == 6
            if mode == pb.OUTPUT_MODE_FINAL_ONLY:
                assert len(deltas) == 1


async def test_log_probabilities_come_with_tokens_and_those_of_the_prompt_before(ready: GatewayBench) -> None:
    asked = request([5, 6, 7], sampling=sampling(logprobs=0, prompt_logprobs=0, max_tokens=6, seed=3, ignore_eos=True))
    events = await read_all(ready.inference().Generate(asked))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:2] == ["started", "prompt_logprobs"]
    assert kinds.count("prompt_logprobs") == 1
    assert [each.token_id for each in events[1].prompt_logprobs.positions] == [6, 7]
    for event in events[2:-1]:
        assert [each.token_id for each in event.delta.logprobs] == list(event.delta.token_ids)


async def test_a_constrained_completion_is_of_its_form(ready: GatewayBench) -> None:
    forms: dict[str, tuple[Any, Callable[[str], object]]] = {
        "regex": ("ab{2,4}c", lambda text: re.fullmatch("ab{2,4}c", text)),
        "json_schema": ('{"type": "boolean"}', lambda text: json.loads(text) in (True, False)),
        "grammar": ('start: "x" | "yz"', lambda text: text in ("x", "yz")),
        "choice": (pb.Choice(texts=["no", "yes"]), lambda text: text in ("no", "yes")),
    }
    for name, (form, fits) in forms.items():
        asked = request([5], sampling=sampling(seed=3, **{name: form}))
        events = await read_all(ready.inference().Generate(asked))
        assert fits("".join(event.delta.text for event in events)), name
        assert events[-1].finished.stop_token_id == 256


async def test_a_bad_form_is_an_invalid_argument_by_its_field(ready: GatewayBench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(request([5], sampling=sampling(regex="a("))))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith("sampling.regex: ")
    assert "unclosed group" in str(caught.value.details())


async def test_the_template_is_shown_tools_and_their_calls(ready: GatewayBench) -> None:
    messages = [
        pb.ChatMessage(role="assistant", tool_calls_json='[{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]'),
        pb.ChatMessage(role="tool", content="2", tool_call_id="c1", name="f"),
    ]
    chat = pb.ChatMessages(messages=messages, tools_json='[{"function": {"name": "f"}}]')
    tokens = (await ready.inference().Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    text = (await ready.inference().Detokenize(pb.DetokenizeRequest(token_ids=tokens))).text
    assert text == "[assistant][tool]2[assistant]"


async def test_shutting_down_ends_streams_unavailable_and_tells_ranks(bench: GatewayBench) -> None:
    rank, life = await bench.join()
    rank.may_step.clear()
    call = bench.inference().Generate(request([1], sampling=sampling(**ENDLESS)))
    await call.read()
    began_s = time.monotonic()
    await bench.close()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in str(caught.value.details())
    rank.may_step.set()
    await asyncio.wait_for(asyncio.gather(life, return_exceptions=True), 5)
    assert rank.kinds[-1] == "shutdown"
    assert time.monotonic() - began_s < 2.5


def test_a_directory_made_of_other_weights_is_served_under_its_own_name_and_says_of_which(tmp_path: Path) -> None:
    write_source(write_model(tmp_path), ModelSource("pypi://package/tiny", "wheel package==1", "widened", "00", "bf16"))
    info = read_model(write_manifest(tmp_path / "g.yaml"), tmp_path).info
    assert (info.model_uri, info.source) == ("pypi://package/tiny", "wheel package==1, widened")


async def test_model_and_server_info(ready: GatewayBench) -> None:
    stub = ready.inference()
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model_uri, model.architecture, model.dtype) == ("hf://org/model", "LlamaForCausalLM", "float32")
    assert (model.vocab_size, model.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert (list(model.eos_token_ids), model.has_chat_template) == ([256], True)
    assert (model.num_parameters > 1e6, model.source) == (True, "")
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.name, server.ready, server.world_size, server.epoch) == ("g", True, 1, 1)
    assert server.uptime_s > 0


async def test_a_bug_is_internal_and_does_not_tell_its_details(
    ready: GatewayBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ready.gateway.core, "submit", _raise_secret)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(ready.inference().Generate(request()))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())
    assert "secret" in caplog.text


def _raise_secret(*_: object) -> None:
    raise RuntimeError("secret")


async def test_the_next_epoch_serves_after_a_rank_came_back(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path)) as bench:
        _, life = await bench.join()
        life.cancel()
        await bench.until(lambda: not bench.gateway.group.is_ready)
        await bench.join()
        events = await read_all(bench.inference().Generate(request([5], sampling=sampling(seed=3, max_tokens=2))))
        assert [token for event in events[1:-1] for token in event.delta.token_ids] == expected([5], seed=3, count=2)
        assert (await bench.inference().GetServerInfo(pb.GetServerInfoRequest())).epoch == 2


async def test_a_merged_answer_has_its_reasoning() -> None:
    async def events() -> AsyncIterator[StreamEvent]:
        yield pb.Delta(reasoning="H", token_ids=[1])
        yield pb.Delta(reasoning="m", text="a", token_ids=[2])
        yield pb.Finished()

    delta, _ = [event async for event in merged(events())]
    assert delta == pb.Delta(reasoning="Hm", text="a", token_ids=[1, 2])


async def test_an_answer_that_one_message_has_no_room_for_comes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MAX_EVENT_BYTES", 20)

    async def events() -> AsyncIterator[StreamEvent]:
        for number in range(1, 6):
            yield pb.Delta(text=f"text{number}", token_ids=[number])
        yield pb.Finished()

    deltas = [event async for event in merged(events()) if isinstance(event, pb.Delta)]
    assert [list(delta.token_ids) for delta in deltas] == [[1, 2], [3, 4], [5]]
    assert [delta.text for delta in deltas] == ["text1text2", "text3text4", "text5"]


@pytest.mark.parametrize("number", [0, 1, 7, 100])
def test_log_probabilities_of_a_long_prompt_come_in_several_messages(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "MAX_EVENT_BYTES", 100)
    positions = [TokenLogprobs(token_id=token, logprob=-1.5) for token in range(number)]
    messages = list(inference.stream_events(pb.PromptLogprobs(positions=positions)))
    assert [each for message in messages for each in message.prompt_logprobs.positions] == positions
    assert messages
    assert all(message.ByteSize() <= 110 for message in messages)
