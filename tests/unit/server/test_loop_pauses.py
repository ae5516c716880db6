"""No request makes the others wait: the loop's longest pause while a gateway reads what is long, wide or deep.

A gateway is a process of its own here, so what is measured is its loop, not the test's.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from tests.unit.server.gateway_process import GatewayProcess

pytestmark = pytest.mark.unit

MAX_PAUSE_S = 0.25
MAX_GAP_S = 0.1
"""Of another stream, beside a prompt of four megabytes."""
MAX_GROWTH_BYTES = 64 * 1024 * 1024
"""A message and its fields, a few times over."""
MAX_MODEL_LEN = 820_000
"""So long that four megabytes are not refused by their length in bytes, but tokenised."""
WORDS = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"), max_model_len=MAX_MODEL_LEN)
    yield process
    process.close()


@pytest.fixture
def stub(gateway: GatewayProcess) -> Iterator[Any]:
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(gateway.addresses["inference"], options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def _text(num_bytes: int) -> str:
    return (WORDS * (num_bytes // len(WORDS) + 1))[:num_bytes]


def _chat(num_messages: int, content: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content)] * num_messages)


def _generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


def _check(gateway: GatewayProcess, ask: Callable[[], None], name: str) -> None:
    """Ask, up to three times: a busy machine can only make a pause longer; what always takes long shows each time."""
    before = gateway.report()
    pauses: list[float] = []
    while len(pauses) < 3 and (not pauses or pauses[-1] >= MAX_PAUSE_S):
        ask()
        report = gateway.report()
        assert report.is_idle
        pauses.append(report.pause_s)
        growth_bytes = report.peak_bytes - before.resident_bytes
        print(f"\n{name}: pause {pauses[-1]:.3f} s, growth {growth_bytes / 2**20:.0f} MiB")
        assert growth_bytes < MAX_GROWTH_BYTES
    assert min(pauses) < MAX_PAUSE_S


STOPS = [f"{'ab' * 127}{index:x}x" for index in range(16)]
LONG = {
    "text": _generate(text=_text(4_000_000)),
    "chat": _generate(chat=_chat(1, _text(1_000_000))),
    "many messages": _generate(chat=_chat(4096, 5 * WORDS)),
    "too many messages": _generate(chat=_chat(200_000, "a")),
    "empty messages": _generate(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * 1_000_000)),
    "tokens": _generate(token_ids=pb.TokenIds(ids=[5] * 2_000_000)),
    "received": _generate(text="a", received=[pb.Received(token_ids=[5] * 2_000_000)]),
    "stop strings": _generate(text="a", sampling=pb.SamplingParams(stop=["a" * 500_000] * 15, n=16)),
    "biases": _generate(text="a", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(600_000), 1.0))),
    "tools": _generate(chat=pb.ChatMessages(tools_json="[" + "{}," * 2_500_000 + "{}]")),
    "schema": _generate(text="a", sampling=pb.SamplingParams(json_schema="[" * 8_000_000)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_request_does_not_pause_the_others(gateway: GatewayProcess, stub: Any, name: str) -> None:
    def ask() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(LONG[name], timeout=100))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    _check(gateway, ask, name)


@pytest.mark.parametrize("name", ["text", "chat"])
def test_another_stream_goes_on_beside_a_long_request(gateway: GatewayProcess, stub: Any, name: str) -> None:
    """Its longest gap is measured where a person would see it, up to three times as above."""
    gaps: list[float] = []
    while len(gaps) < 3 and (not gaps or gaps[-1] >= MAX_GAP_S):
        sampling = pb.SamplingParams(max_tokens=MAX_MODEL_LEN // 2, ignore_eos=True, seed=1)
        stream = stub.Generate(_generate(text="a", sampling=sampling), timeout=100)
        times = [time.monotonic() for _ in zip(range(3), stream, strict=False)]
        asking = threading.Thread(target=_refused, args=(gateway.addresses["inference"], LONG[name]))
        asking.start()
        for _ in stream:
            times.append(time.monotonic())
            if not asking.is_alive():
                break
        stream.cancel()
        gaps.append(max(after - before for before, after in itertools.pairwise(times)))
        print(f"\n{name}: {len(times)} events, longest gap {gaps[-1]:.3f} s")
        assert len(times) > 20
    assert min(gaps) < MAX_GAP_S


def _refused(address: str, request: pb.GenerateRequest) -> None:
    """Ask in another process: this one's lock is then free for the stream."""
    program = f"""
import sys, grpc
with grpc.insecure_channel({address!r}, options=[("grpc.max_send_message_length", -1)]) as channel:
    call = channel.unary_stream("/hetero.v1.Inference/Generate")(sys.stdin.buffer.read(), timeout=100)
    sys.exit(call.code() is not grpc.StatusCode.INVALID_ARGUMENT)
"""
    subprocess.run([sys.executable, "-c", program], input=request.SerializeToString(), check=True)


def test_long_texts_are_tokenised_and_turned_back_without_a_pause(gateway: GatewayProcess, stub: Any) -> None:
    text = _text(1_000_000)
    gateway.report()
    token_ids = stub.Tokenize(pb.TokenizeRequest(text=text), timeout=100).token_ids
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), timeout=100).text == text
    assert gateway.report().pause_s < MAX_PAUSE_S


def test_going_on_behind_long_answers_does_not_pause_the_others(gateway: GatewayProcess, stub: Any) -> None:
    received = [pb.Received(token_ids=[5] * 3_000)] * 16
    sampling = pb.SamplingParams(stop=STOPS, n=16, max_tokens=3_001, seed=1)

    def ask() -> None:
        events = list(
            stub.Generate(_generate(text="a", received=received, sampling=sampling, request_id="taken"), timeout=100)
        )
        assert sum(event.HasField("finished") for event in events) == 16

    _check(gateway, ask, "received")


def _body(**fields: Any) -> bytes:
    return json.dumps({"model": "g"} | fields).encode()


BODIES = {
    "text": ("/v1/completions", _body(prompt=_text(1_000_000) + "\\u20ac")),
    "tokens": ("/v1/completions", _body(prompt=[5] * 500_000, top_p=7)),
    "wrong tokens": ("/v1/completions", _body(prompt=[1.5] * 500_000)),
    "unknown fields": ("/v1/completions", _body(prompt="a", top_p=7, **{f"k{index}": 1 for index in range(250_000)})),
    "messages": ("/v1/chat/completions", _body(messages=[{"role": "user", "content": WORDS}] * 4096, top_p=7)),
    "parts": (
        "/v1/chat/completions",
        _body(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}], top_p=7),
    ),
    "lists": ("/v1/completions", b'{"model":"g","prompt":[' + b"[]," * 2_500_000 + b"[]]}"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_long_body_does_not_pause_the_others(gateway: GatewayProcess, name: str) -> None:
    path, content = BODIES[name]

    def ask() -> None:
        with httpx.Client(base_url=f"http://{gateway.addresses['http']}", trust_env=False, timeout=100) as http:
            assert http.post(path, content=content).status_code == 400

    _check(gateway, ask, name)


ANSWERS = {
    "echoed prompts": _body(prompt=[5] * 3_000, echo=True, logprobs=0, n=16, max_tokens=1),
    "an echoed prompt in a stream": _body(prompt=[5] * 3_000, echo=True, logprobs=0, n=16, max_tokens=1, stream=True),
    "stop strings": _body(prompt=["a"] * 64, n=16, max_tokens=1, stop=STOPS),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_long_answer_does_not_pause_the_others(gateway: GatewayProcess, name: str) -> None:
    def ask() -> None:
        with httpx.Client(base_url=f"http://{gateway.addresses['http']}", trust_env=False, timeout=100) as http:
            assert http.post("/v1/completions", content=ANSWERS[name]).status_code == 200

    _check(gateway, ask, name)
