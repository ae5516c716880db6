"""The synchronous client against a real gRPC server on a unix socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_api.v1 import inference_pb2 as pb
from hetero_client import ChatMessage, Delta, Finished, FinishReason, HeteroClient, SamplingParams, Started
from hetero_client.errors import (
    DeadlineError,
    DuplicateRequestError,
    FieldViolation,
    IncompleteStreamError,
    InvalidRequestError,
    NotConnectedError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from tests.support.fake_gateway import NOT_SERVING, SERVING, FakeGateway

pytestmark = pytest.mark.unit


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    fake = FakeGateway(f"unix:{tmp_path / 'gateway.sock'}")
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[HeteroClient]:
    with HeteroClient(gateway.address) as client:
        yield client


def test_stream_is_started_then_deltas_then_finished(client: HeteroClient) -> None:
    events = list(client.generate("echo one two", request_id="mine"))
    assert events[0] == Started("mine", 3, 7)
    assert events[1:3] == [Delta(0, (0,), "one "), Delta(0, (1,), "two ")]
    end = events[3]
    assert isinstance(end, Finished)
    assert (end.reason, end.matched_stop, end.usage.cached_tokens) == (FinishReason.STOP, 2, 1)
    assert (end.timings.queued_s, end.timings.first_token_s, end.timings.total_s) == (0.001, 0.02, 1.5)


def test_generate_text_collects_and_asks_for_one_delta(client: HeteroClient, gateway: FakeGateway) -> None:
    completion = client.generate_text([ChatMessage("user", "echo a b")], sampling=SamplingParams(temperature=0.0))
    request = gateway.inference.requests[0]
    assert (completion.text, completion.token_ids) == ("a b ", (0, 1))
    assert (completion.request_id, len(completion.request_id)) == (request.request_id, 32)
    assert request.output_mode == pb.OUTPUT_MODE_FINAL_ONLY
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")


def test_token_ids_travel_as_they_are(client: HeteroClient) -> None:
    assert client.generate_text([5, 6]).text == "5 6 "


def test_closing_the_stream_cancels_the_call(client: HeteroClient, gateway: FakeGateway) -> None:
    with client.generate("hang", request_id="r1") as stream:
        assert isinstance(next(stream), Started)
        assert stream.request_id == "r1"
    assert gateway.inference.cancelled.wait(5)
    assert list(stream) == []


def test_dropping_the_stream_cancels_the_call(client: HeteroClient, gateway: FakeGateway) -> None:
    for _ in client.generate("hang"):
        break
    assert gateway.inference.cancelled.wait(5)


def test_deadline_ends_a_stream_with_deadline_error(client: HeteroClient) -> None:
    with pytest.raises(DeadlineError):
        list(client.generate("hang", timeout_s=0.2))


def test_wrong_field_is_named(client: HeteroClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling\.temperature: must be >= 0") as caught:
        list(client.generate("invalid"))
    assert caught.value.violations == (FieldViolation("sampling.temperature", "must be >= 0"),)


def test_full_queue_says_when_to_try_again(client: HeteroClient) -> None:
    with pytest.raises(QueueFullError) as caught:
        list(client.generate("full"))
    assert caught.value.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("prompt", "kind"), [("loading", UnavailableError), ("duplicate", DuplicateRequestError), ("boom", ServerError)]
)
def test_each_status_has_its_error(client: HeteroClient, prompt: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        list(client.generate(prompt, resume_timeout_s=0))
    assert type(caught.value) is kind


def test_stream_without_finished_is_an_error(client: HeteroClient) -> None:
    with pytest.raises(IncompleteStreamError, match="r1"):
        list(client.generate("unfinished x", request_id="r1"))


def test_value_that_no_message_holds_is_refused_by_name(client: HeteroClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling\.seed"):
        client.generate("echo", sampling=SamplingParams(seed=-1))
    with pytest.raises(InvalidRequestError, match=r"token_ids\[1\]"):
        client.generate([1, -1])


def test_nobody_at_the_address_is_not_connected(tmp_path: Path) -> None:
    with HeteroClient(f"unix:{tmp_path / 'nobody.sock'}") as client, pytest.raises(NotConnectedError, match="nobody"):
        client.server_info()


def test_unary_calls(client: HeteroClient) -> None:
    assert client.tokenize("ab") == (97, 98)
    assert client.tokenize([ChatMessage("user", "c")]) == (99,)
    assert client.detokenize([104, 105]) == "hi"
    assert client.abort("r1")
    assert not client.abort("r2")
    assert client.model_info().eos_token_ids == (2,)
    assert client.server_info().world_size == 2


def test_wait_ready_returns_when_health_turns_to_serving(client: HeteroClient, gateway: FakeGateway) -> None:
    gateway.set_health(NOT_SERVING)
    waiter = threading.Thread(target=client.wait_ready, args=(10,))
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    gateway.set_health(SERVING)
    waiter.join(5)
    assert not waiter.is_alive()


def test_wait_ready_bridges_a_server_that_is_not_up_yet(tmp_path: Path) -> None:
    fake = FakeGateway(f"unix:{tmp_path / 'late.sock'}")
    with HeteroClient(fake.address) as client:
        waiter = threading.Thread(target=client.wait_ready, args=(10,))
        waiter.start()
        waiter.join(0.2)
        fake.start()
        fake.set_health(SERVING)
        waiter.join(10)
        assert not waiter.is_alive()
    fake.stop()


def test_wait_ready_gives_up_in_time(client: HeteroClient, gateway: FakeGateway) -> None:
    gateway.set_health(NOT_SERVING)
    with pytest.raises(DeadlineError, match=r"did not become ready within 0\.3 s"):
        client.wait_ready(0.3)
