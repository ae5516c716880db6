"""A stream that breaks goes on, and who reads it does not see that it did. Against a real gRPC server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1.logprobs_pb2 import TokenLogprobs
from hetero_client import (
    AsyncHeteroClient,
    Delta,
    Event,
    Finished,
    HeteroClient,
    PromptLogprobs,
    SamplingParams,
    Started,
    resuming,
)
from hetero_client.errors import (
    DeadlineError,
    DuplicateRequestError,
    IncompleteStreamError,
    InvalidRequestError,
    NotConnectedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    ServerError,
    UnavailableError,
)
from hetero_client.resuming import LONGEST_PAUSE_S, ResumableRequest, ServerRecord
from tests.support.fake_gateway import NOT_SERVING, SERVING, FakeGateway

pytestmark = pytest.mark.unit

WORDS = "one two three four five"


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


def text_of(events: list[Event], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.index == index)


def check_whole(events: list[Event], *, n: int = 1) -> None:
    """Started once, every token once, every end once."""
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[0], Started)
    for index in range(n):
        tokens = [t for e in events if isinstance(e, Delta) and e.index == index for t in e.token_ids]
        assert tokens == list(range(5))
        assert text_of(events, index) == "one two three four five "
    assert sorted(e.index for e in events if isinstance(e, Finished)) == list(range(n))


def test_a_stream_that_breaks_again_and_again_is_one_stream(client: HeteroClient, gateway: FakeGateway) -> None:
    check_whole(list(client.generate(f"break-2 {WORDS}")))
    requests = gateway.inference.requests
    assert [[list(entry.token_ids) for entry in request.received] for request in requests] == [
        [], [[0, 1]], [[0, 1, 2, 3]],
    ]  # fmt: skip
    assert len({(request.request_id, request.sampling.seed) for request in requests}) == 1
    assert requests[0].request_id
    assert requests[0].sampling.HasField("seed")


def test_a_stream_that_breaks_before_it_started_is_taken_up_by_name(client: HeteroClient, gateway: FakeGateway) -> None:
    check_whole(list(client.generate(f"break-0-2 {WORDS}", sampling=SamplingParams(seed=5), request_id="mine")))
    assert [(r.request_id, r.sampling.seed, len(r.received)) for r in gateway.inference.requests] == [
        ("mine", 5, 0), ("mine", 5, 1), ("mine", 5, 1),
    ]  # fmt: skip


def test_completions_are_resumed_each_from_where_it_was(client: HeteroClient, gateway: FakeGateway) -> None:
    sampling = SamplingParams(n=3, logprobs=2, prompt_logprobs=0)
    events = list(client.generate(f"break-2 {WORDS}", sampling=sampling))
    check_whole(events, n=3)
    assert [type(event) for event in events].count(PromptLogprobs) == 1
    assert all(len(e.logprobs) == len(e.token_ids) for e in events if isinstance(e, Delta))
    assert len(gateway.inference.requests[1].received) == 3


def test_log_probabilities_of_a_prompt_in_several_events_come_once_each() -> None:
    request = pb.GenerateRequest(text="x")
    resumable = ResumableRequest(request, timeout_s=None, resume_timeout_s=1, server=ServerRecord())
    read: list[int] = []
    for call in ([[1, 2], [3]], [[1, 2]], [[1], [2, 3, 4], [5]]):
        resumable.next_call()
        for part in call:
            positions = [TokenLogprobs(token_id=token) for token in part]
            event = resumable.read(pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=positions)))
            assert event is None or isinstance(event, PromptLogprobs)
            read += [each.token_id for each in event.positions] if event is not None else []
    assert read == [1, 2, 3, 4, 5]


def test_texts_at_once_survive_a_break(client: HeteroClient) -> None:
    completions = client.generate_texts(f"break-2 {WORDS}", sampling=SamplingParams(n=2, logprobs=1))
    assert [(c.index, c.text, len(c.logprobs)) for c in completions] == [(i, f"{WORDS} ", 5) for i in range(2)]


def test_one_text_is_not_a_choice_of_several(client: HeteroClient) -> None:
    with pytest.raises(InvalidRequestError, match="generate_texts"):
        client.generate_text("echo", sampling=SamplingParams(n=2))


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("invalid", InvalidRequestError),
        ("duplicate", DuplicateRequestError),
        ("boom", ServerError),
        ("full", QueueFullError),
    ],
)
def test_what_was_refused_for_good_is_not_sent_again(
    client: HeteroClient, gateway: FakeGateway, prompt: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        list(client.generate(prompt))
    assert len(gateway.inference.requests) == 1


def test_resuming_ends_with_its_limit_and_the_last_error(client: HeteroClient, gateway: FakeGateway) -> None:
    with pytest.raises(UnavailableError, match="the group is loading"):
        list(client.generate("loading", resume_timeout_s=0.3))
    assert len(gateway.inference.requests) > 1


def test_a_client_knows_that_its_server_has_answered(
    client: HeteroClient, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "UNSTARTED_TIMEOUT_S", 0.1)

    def tried_for_s() -> float:
        began_s = time.monotonic()
        with pytest.raises(UnavailableError):
            list(client.generate("loading", resume_timeout_s=1.5))
        return time.monotonic() - began_s

    assert tried_for_s() < 1.5
    list(client.generate("echo"))
    assert tried_for_s() >= 1.5


def test_resuming_can_be_switched_off(client: HeteroClient, gateway: FakeGateway) -> None:
    with pytest.raises(UnavailableError):
        list(client.generate(f"break-2 {WORDS}", resume_timeout_s=0))
    assert len(gateway.inference.requests) == 1


def test_resuming_keeps_the_deadline(client: HeteroClient) -> None:
    with pytest.raises(DeadlineError):
        list(client.generate("loading", timeout_s=0.3))


def test_a_stream_outlives_its_gateway(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'gateway.sock'}"
    first, second = FakeGateway(address), FakeGateway(address)
    first.start()
    with HeteroClient(address) as client:
        stream = client.generate("hang")
        assert isinstance(next(stream), Started)
        first.die()
        second.inference.cancelled.set()  # "hang" ends at once there, and unfinished
        second.start()
        with pytest.raises(IncompleteStreamError, match="0 of 1 completions finished"):
            list(stream)
    assert second.inference.requests[0].request_id == stream.request_id
    first.stop()
    second.stop()


def test_closing_ends_a_stream_that_waits_to_resume(client: HeteroClient) -> None:
    stream = client.generate("loading")
    ended: list[list[Event]] = []
    reader = threading.Thread(target=lambda: ended.append(list(stream)))
    reader.start()
    stream.close()
    reader.join(5)
    assert ended == [[]]


async def test_the_asyncio_client_resumes_as_well(gateway: FakeGateway) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        check_whole([event async for event in client.generate(f"break-2 {WORDS}")])
        texts = await client.generate_texts(f"break-0-9 {WORDS}", sampling=SamplingParams(n=2))
        assert [completion.text for completion in texts] == [f"{WORDS} "] * 2
        with pytest.raises(UnavailableError):
            [event async for event in client.generate("loading", resume_timeout_s=0.2)]


async def test_cancelling_a_task_that_waits_to_resume_ends_it(gateway: FakeGateway) -> None:
    async with AsyncHeteroClient(gateway.address) as client:
        task = asyncio.ensure_future(anext(client.generate("loading")))
        assert await asyncio.to_thread(gateway.inference.called.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class Attempts:
    """A request whose calls all break, on a clock of the test's."""

    def __init__(
        self,
        *,
        timeout_s: float | None = None,
        resume_timeout_s: float = 60.0,
        n: int = 1,
        server: ServerRecord | None = None,
    ) -> None:
        self.now_s = 0.0
        self.request = ResumableRequest(
            pb.GenerateRequest(sampling=pb.SamplingParams(n=n)),
            timeout_s=timeout_s,
            resume_timeout_s=resume_timeout_s,
            server=server or ServerRecord(),
            clock=lambda: self.now_s,
            jitter=lambda: 0.5,
        )

    def break_(self, error: RequestError | None = None) -> float:
        pause_s = self.request.pause_after(error or UnavailableError("gone", code="UNAVAILABLE"))
        self.now_s += pause_s
        return pause_s

    def receive(self, **event: object) -> Event | None:
        return self.request.read(pb.GenerateEvent(**event))  # type: ignore[arg-type]


def test_pauses_double_to_a_second_and_begin_anew_with_a_token() -> None:
    attempts = Attempts()
    assert [attempts.break_() for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, LONGEST_PAUSE_S]
    attempts.receive(delta=pb.Delta(token_ids=[1]))
    assert attempts.break_() == 0.05


def test_the_limit_runs_from_the_first_break_without_a_token_in_between() -> None:
    attempts = Attempts(resume_timeout_s=2.0)
    for _ in range(3):
        attempts.break_()
    attempts.receive(started=pb.Started())  # being accepted is no progress
    pauses_s = [attempts.break_() for _ in range(3)]
    assert pauses_s == [0.4, 0.8, 1.0]
    assert attempts.now_s == pytest.approx(2.55)
    with pytest.raises(UnavailableError):
        attempts.break_()


def test_a_stream_that_has_not_begun_waits_as_long_for_a_server_that_had_answered_another() -> None:
    """A node that died stays behind its Service for most of a minute, and a call to it takes ten seconds to fail."""
    server = ServerRecord()
    other, attempts = Attempts(server=server), Attempts(server=server)
    attempts.break_()
    attempts.now_s = 9.0
    attempts.break_()
    attempts.now_s = 11.0
    with pytest.raises(UnavailableError):
        attempts.break_()
    other.receive(started=pb.Started())
    assert attempts.break_() > 0
    attempts.now_s = 61.0
    with pytest.raises(UnavailableError):
        attempts.break_()


def test_a_pause_ends_with_the_deadline_and_no_call_follows() -> None:
    attempts = Attempts(timeout_s=0.12)
    attempts.break_()
    assert attempts.break_() == pytest.approx(0.07)
    with pytest.raises(DeadlineError):
        attempts.request.next_call()


def test_a_full_queue_is_waited_for_once_the_stream_has_begun() -> None:
    full = QueueFullError("full", retry_after_s=2.5)
    attempts = Attempts()
    with pytest.raises(QueueFullError):
        attempts.break_(full)
    attempts.receive(started=pb.Started())
    assert attempts.break_(full) == 2.5


@pytest.mark.parametrize("error", [NotConnectedError("x"), RequestCancelledError("the server ended the call")])
def test_lost_connections_and_calls_that_the_server_cut_off_are_resumed(error: RequestError) -> None:
    assert Attempts().break_(error) == 0.05


def test_what_a_completion_that_finished_is_told_again_is_not_seen_twice() -> None:
    attempts = Attempts(n=2)
    assert attempts.receive(finished=pb.Finished(index=0, reason=pb.FINISH_REASON_STOP)) is not None
    attempts.break_()
    assert attempts.receive(delta=pb.Delta(index=0, token_ids=[5])) is None
    assert attempts.receive(finished=pb.Finished(index=0, reason=pb.FINISH_REASON_STOP)) is None
    assert attempts.receive(delta=pb.Delta(index=1, token_ids=[5])) is not None
    request, _ = attempts.request.next_call()
    attempts.request.next_call()
    assert [list(entry.token_ids) for entry in request.received] == [[], [5]]


def test_the_next_call_waits_until_the_server_says_that_it_serves(client: HeteroClient, gateway: FakeGateway) -> None:
    gateway.set_health(NOT_SERVING)
    events: list[Event] = []
    reader = threading.Thread(target=lambda: events.extend(client.generate(f"break-2 {WORDS}")))
    reader.start()
    assert gateway.inference.called.wait(5)
    reader.join(0.5)
    assert (reader.is_alive(), len(gateway.inference.requests)) == (True, 1)
    gateway.set_health(SERVING)
    reader.join(10)
    check_whole(events)


def test_a_stream_finds_a_gateway_that_comes_back_at_once(tmp_path: Path) -> None:
    first = FakeGateway("127.0.0.1:0")
    address = f"127.0.0.1:{first.start()}"
    with HeteroClient(address) as client:
        stream = client.generate("break-2 " + WORDS)
        assert isinstance(next(stream), Started)
        first.stop()
        events: list[Event] = []
        reader = threading.Thread(target=lambda: events.extend(stream))
        reader.start()
        reader.join(1.5)  # some attempts find nobody
        second = FakeGateway(address)
        second.start()
        began_s = time.monotonic()
        reader.join(20)
        took_s = time.monotonic() - began_s
    second.stop()
    assert text_of(events) == f"{WORDS} "
    assert took_s < 5  # a channel left to itself takes twice as long to look again
