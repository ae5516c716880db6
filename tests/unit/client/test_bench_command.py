"""`hetero bench`: plans, samples, figures, and both doors against servers that are played."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hetero_api.contract import EXIT_FAILURE, EXIT_OK
from hetero_client.access import Access
from hetero_client.cli.main import app
from hetero_client.errors import CredentialsError, NotConnectedError, QueueFullError, RequestError
from hetero_client.load.doors import HttpDoor
from hetero_client.load.figures import Spread, figures_of, percentile, token_gaps
from hetero_client.load.run import LoadPlan, Sample, run_load
from tests.support.fake_gateway import FakeGateway

pytestmark = pytest.mark.unit

PLAN = LoadPlan(num_requests=6, concurrency=2, prompt_tokens=5, output_tokens=3)


class PlayedDoor:
    """Answers with one token at a time; refuses prompts that begin with `refused`, and counts what is under way."""

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.prompts: list[list[int]] = []
        self.most = 0
        self._refused = list(refused)
        self._under_way = 0
        self._lock = threading.Lock()
        self._two = threading.Barrier(2)

    def stream(self, prompt: Sequence[int], *, output_tokens: int) -> Iterator[int]:
        with self._lock:
            self.prompts.append(list(prompt))
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        self._two.wait(10)
        try:
            if list(prompt) == self._refused:
                raise QueueFullError("queue is full")
            yield from [1] * output_tokens
        finally:
            with self._lock:
                self._under_way -= 1

    def close(self) -> None:
        pass


def test_as_many_requests_are_under_way_as_were_asked_for() -> None:
    door = PlayedDoor()
    samples = run_load(door, PLAN)
    assert (len(samples), door.most) == (6, 2)
    assert [sample.num_tokens for sample in samples] == [3] * 6
    assert sorted(door.prompts) == sorted(PLAN.prompt(number) for number in range(6))
    assert len({tuple(prompt) for prompt in door.prompts}) == 6


def test_a_request_that_fails_is_a_sample_with_its_error() -> None:
    samples = run_load(PlayedDoor(refused=PLAN.prompt(3)), PLAN)
    assert [sample.error for sample in samples] == ["", "", "", "queue is full", "", ""]
    figures = figures_of(PLAN, samples)
    assert (figures.requests, figures.failed, figures.error) == (5, 1, "queue is full")
    assert (figures.prompt_tokens, figures.output_tokens) == (25, 15)


def test_a_rate_draws_the_same_times_from_the_same_seed() -> None:
    plan = replace(PLAN, num_requests=2000, rate=50.0)
    times = list(plan.due_times())
    assert times == list(plan.due_times()) == sorted(times)
    assert times != list(replace(plan, seed=1).due_times())
    assert times[-1] / (len(times) - 1) == pytest.approx(1 / 50.0, rel=0.1)
    assert set(PLAN.due_times()) == {0.0}


def test_requests_at_a_rate_do_not_wait_for_one_another() -> None:
    plan = replace(PLAN, num_requests=4, concurrency=1, rate=1000.0)
    samples = run_load(PlayedDoor(), plan)  # its barrier needs two at once
    assert [sample.due_s for sample in samples] == list(plan.due_times())
    assert all(sample.ended_s >= sample.due_s for sample in samples)


def test_an_interrupt_ends_the_load_and_the_streams_under_way() -> None:
    class SlowDoor(PlayedDoor):
        def __init__(self) -> None:
            super().__init__()
            self.closed = threading.Event()

        def stream(self, prompt: Sequence[int], *, output_tokens: int) -> Iterator[int]:
            self.prompts.append(list(prompt))
            if len(self.prompts) == 2:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self.closed.wait(30)
            yield 1

        def close(self) -> None:
            self.closed.set()

    door = SlowDoor()
    # A shell starts what runs in the background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_load(door, PLAN)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(door.prompts) == 2


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentiles_lie_between_the_nearest_values(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(value)


def test_spreads() -> None:
    assert Spread.of([]) is None
    spread = Spread.of([3.0, 1.0, 2.0])
    assert spread is not None
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == pytest.approx((2.0, 2.0, 2.8, 2.98))


def test_figures_count_tokens_that_came_together() -> None:
    samples = [
        Sample(due_s=0.0, ended_s=2.0, pieces=((0.5, 1), (0.7, 2), (2.0, 1))),
        Sample(due_s=1.0, ended_s=4.0, pieces=((2.0, 4),)),
    ]
    assert list(token_gaps(samples[0])) == pytest.approx([0.1, 0.1, 1.3])
    figures = figures_of(replace(PLAN, num_requests=2), samples)
    assert figures.duration_s == 4.0
    assert (figures.output_tokens_per_s, figures.total_tokens_per_s, figures.requests_per_s) == (2.0, 4.5, 0.5)
    assert figures.time_to_first_token_s is not None
    assert figures.time_to_first_token_s.mean == 0.75
    assert figures.time_per_output_token_s is not None
    assert figures.time_per_output_token_s.mean == pytest.approx(0.5)
    assert figures.request_latency_s is not None
    assert figures.request_latency_s.p50 == 2.5


def hetero(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--requests", "5", "--concurrency", "2", *arguments])


def test_the_grpc_door_counts_the_tokens_of_deltas(tmp_path: Path) -> None:
    gateway = FakeGateway(f"unix:{tmp_path / 'g.sock'}")
    gateway.start()
    try:
        sizes = ("--prompt-tokens", "7", "--output-tokens", "4")
        result = hetero(*sizes, "--rate", "1000", "--json", "--address", gateway.address)
    finally:
        gateway.stop()
    assert result.exit_code == EXIT_OK, result.output
    data = json.loads(result.stdout)
    assert (data["requests"], data["failed"], data["prompt_tokens"]) == (5, 0, 35)
    assert data["output_tokens"] == 35  # the fake says the prompt again
    assert data["time_to_first_token_s"].keys() == {"mean", "p50", "p90", "p99"}
    sent = gateway.inference.requests
    assert len(sent) == 6  # one before, uncounted
    assert {len(request.token_ids.ids) for request in sent} == {7}
    assert {(request.sampling.max_tokens, request.sampling.ignore_eos) for request in sent} == {(4, True)}


class PlayedApi(BaseHTTPRequestHandler):
    """`/v1/models`, and `/v1/completions` that streams two pieces of one and of three tokens."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "tiny"}]}), kind="application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen: list[Any] = self.server.seen  # type: ignore[attr-defined]
        seen.append((body, self.headers["Authorization"]))
        if body["max_tokens"] == 13:
            self._answer("no such luck", kind="text/plain", status=429)
        elif body["max_tokens"] == 14:
            self._answer('data: {"error": {"message": "the group is gone"}}\n\n', kind="text/event-stream")
        else:
            chunks = [{"usage": {"completion_tokens": count}} for count in (1, 4)]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._answer("".join([*lines, "data: [DONE]\n\n"]), kind="text/event-stream")

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, text: str, *, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def api() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PlayedApi)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_http_door_counts_tokens_by_the_usage_of_each_piece(api: ThreadingHTTPServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    address = f"127.0.0.1:{api.server_port}"
    result = hetero(
        "--door",
        "http",
        "--output-tokens",
        "4",
        "--prompt-tokens",
        "3",
        "--address",
        address,
        "--api-key-file",
        str(key),
    )
    assert result.exit_code == EXIT_OK, result.output
    assert result.stdout.startswith("5 requests in ")
    assert "2 at a time, prompts of 3 tokens" in result.stdout
    for name in ("time to first token", "time between tokens", "whole request"):
        assert name in result.stdout
    seen: list[Any] = api.seen  # type: ignore[attr-defined]
    assert len(seen) == 6
    assert {(body["model"], body["max_tokens"], len(body["prompt"]), auth) for body, auth in seen} == {
        ("tiny", 4, 3, "Bearer secret")
    }
    door = HttpDoor(address, access=Access())
    assert list(door.stream([9, 8], output_tokens=4)) == [1, 3]


@pytest.mark.parametrize(("tokens", "message"), [("13", "HTTP 429: no such luck"), ("14", "the group is gone")])
def test_what_the_http_door_refuses_is_told(api: ThreadingHTTPServer, tokens: str, message: str) -> None:
    door = HttpDoor(f"127.0.0.1:{api.server_port}", access=Access())
    with pytest.raises(RequestError, match=message):
        list(door.stream([9], output_tokens=int(tokens)))
    result = hetero("--door", "http", "--output-tokens", tokens, "--address", f"127.0.0.1:{api.server_port}")
    assert (result.exit_code, message in result.stderr) == (EXIT_FAILURE, True)


def test_the_http_door_shows_no_certificate() -> None:
    with pytest.raises(CredentialsError, match="over gRPC only"):
        HttpDoor("127.0.0.1:1", access=Access(certificate=b"x", private_key=b"y"))


def test_the_http_door_sends_no_key_unencrypted_to_another_machine() -> None:
    with pytest.raises(CredentialsError, match="unencrypted"):
        HttpDoor("192.0.2.1:8000", access=Access(api_key="hk-secret"))
    HttpDoor("192.0.2.1:8000", access=Access(api_key="hk-secret", tls=False))


def test_an_address_that_is_none_is_an_error_of_the_door() -> None:
    with pytest.raises(NotConnectedError, match="localhost:abc"):
        next(HttpDoor("localhost:abc", access=Access()).stream([9], output_tokens=4))


@pytest.mark.parametrize(
    ("models", "message"), [("<html>", "is not JSON"), ("{}", "lists no model"), ("[]", "lists no model")]
)
def test_a_server_of_something_else_is_an_error_of_the_door(models: str, message: str) -> None:
    class Other(PlayedApi):
        def do_GET(self) -> None:
            self._answer(models, kind="application/json")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(RequestError, match=message):
        next(HttpDoor(f"127.0.0.1:{server.server_port}", access=Access()).stream([9], output_tokens=4))
    server.shutdown()
    server.server_close()


def test_a_closed_http_door_ends_the_streams_that_read_from_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        door = HttpDoor(f"127.0.0.1:{server.getsockname()[1]}", access=Access())
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(lambda: list(door.stream([9], output_tokens=4)))
            connection, _ = server.accept()
            with connection:
                connection.recv(1)  # its request; there is never an answer
                door.close()
                with pytest.raises(NotConnectedError):
                    stream.result(30)
