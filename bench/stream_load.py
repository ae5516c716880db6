"""Clients of a gateway in a process of their own: many streams at once, as cheap as they can be.

    python -m bench.stream_load --gateway HOST:PORT --streams N --tokens N [--slow N]
    python -m bench.stream_load --http HOST:PORT --streams N --tokens N [--times N]

Messages are kept as bytes while the clock runs and read afterwards. Prints one JSON object: `wall_s`, from the first
call to the end of the last; `tokens` and `messages`, how many came; `first_ms`, the median over streams from the first
call to a stream's first token; with one stream also `arrived_ns`, when each token came. `--slow` streams more read a
message a second, and are not waited for. `--times` does all that so often, and adds up but for `first_ms`, the median.
With `--http` streams are completions of the OpenAI API, of a gateway's HTTP door or a router's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any, Final

import aiohttp
import grpc

from hetero_api.v1 import inference_pb2 as pb

_GENERATE: Final = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
_PROMPT_TOKENS: Final = 16
_MODEL: Final = "bench"
"""Name of the model over HTTP: that of bench.gateway_alone's resource."""
_SETTINGS: Final = [("grpc.enable_http_proxy", 0)]


def request(number: int, *, tokens: int) -> bytes:
    """Streams differ in their prompts, so that they share no blocks."""
    sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number)
    ids = [(number * 37 + index) % 1000 for index in range(_PROMPT_TOKENS)]
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling).SerializeToString()


async def read(call: Any, into: list[tuple[int, bytes]], *, pause_s: float = 0.0) -> None:
    while (payload := await call.read()) is not grpc.aio.EOF:
        into.append((time.monotonic_ns(), payload))
        if pause_s:
            await asyncio.sleep(pause_s)


def run_one(options: argparse.Namespace) -> dict[str, Any]:
    """A single stream, read by a thread that does nothing else: the least that a client adds."""
    with grpc.insecure_channel(options.gateway, options=_SETTINGS) as channel:
        began_ns = time.monotonic_ns()
        generate: Any = channel.unary_stream(_GENERATE)
        call = generate(request(0, tokens=options.tokens))
        came = [(time.monotonic_ns(), payload) for payload in call]
        wall_s = (time.monotonic_ns() - began_ns) / 1e9
    return summary([came], began_ns=began_ns, wall_s=wall_s)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(options.gateway, options=_SETTINGS) as channel:
        generate: Any = channel.unary_stream(_GENERATE)
        await read(generate(request(0, tokens=1)), [])
        return together([await run_once(generate, options) for _ in range(options.times)])


async def run_once(generate: Any, options: argparse.Namespace) -> dict[str, Any]:
    slow = [generate(request(10_000 + number, tokens=options.slow_tokens)) for number in range(options.slow)]
    reading = [asyncio.create_task(read(call, [], pause_s=1.0)) for call in slow]
    came: list[list[tuple[int, bytes]]] = [[] for _ in range(options.streams)]
    began_ns = time.monotonic_ns()
    calls = [generate(request(number, tokens=options.tokens)) for number in range(options.streams)]
    await asyncio.gather(*(read(call, into) for call, into in zip(calls, came, strict=True)))
    wall_s = (time.monotonic_ns() - began_ns) / 1e9
    for call, task in zip(slow, reading, strict=True):
        call.cancel()
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return summary(came, began_ns=began_ns, wall_s=wall_s)


def summary(came: list[list[tuple[int, bytes]]], *, began_ns: int, wall_s: float) -> dict[str, Any]:
    arrived_ns: list[int] = []
    firsts_ns: list[int] = []
    messages = 0
    for stream in came:
        before = len(arrived_ns)
        for when_ns, payload in stream:
            event = pb.GenerateEvent.FromString(payload)
            messages += event.HasField("delta")
            arrived_ns += [when_ns] * len(event.delta.token_ids)
        firsts_ns += arrived_ns[before : before + 1]
    return {
        "wall_s": wall_s,
        "tokens": len(arrived_ns),
        "messages": messages,
        "first_ms": (statistics.median(firsts_ns) - began_ns) / 1e6,
        "arrived_ns": arrived_ns if len(came) == 1 else [],
    }


async def run_http(options: argparse.Namespace) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{options.http}", connector=connector) as session:
        # Connections are there before the clock runs, as gRPC's is.
        await asyncio.gather(*(read_http(session, number, tokens=1) for number in range(options.streams)))
        runs = []
        for _ in range(options.times):
            began_ns = time.monotonic_ns()
            calls = (read_http(session, number, tokens=options.tokens) for number in range(options.streams))
            came = await asyncio.gather(*calls)
            runs.append(summary_http(came, began_ns=began_ns, wall_s=(time.monotonic_ns() - began_ns) / 1e9))
    return together(runs)


async def read_http(session: aiohttp.ClientSession, number: int, *, tokens: int) -> list[tuple[int, bytes]]:
    asked = {
        "model": _MODEL, "prompt": f"{number} rivers meet the sea where the city was once a village of fishermen.",
        "max_tokens": tokens, "ignore_eos": True, "seed": number, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with session.post("/v1/completions", json=asked) as answer:
        answer.raise_for_status()
        return [(time.monotonic_ns(), part) async for part in answer.content.iter_any()]


def summary_http(came: list[list[tuple[int, bytes]]], *, began_ns: int, wall_s: float) -> dict[str, Any]:
    tokens = messages = 0
    firsts_ns: list[int] = []
    for stream in came:
        texts, used = [], 0
        for when_ns, event in events(stream):
            texts += [when_ns for choice in event["choices"] if choice["text"]]
            used = (event.get("usage") or {}).get("completion_tokens", used)
        firsts_ns += texts[:1]
        messages += len(texts)
        tokens += used
    first_ms = (statistics.median(firsts_ns) - began_ns) / 1e6
    return {"wall_s": wall_s, "tokens": tokens, "messages": messages, "first_ms": first_ms, "arrived_ns": []}


def events(stream: list[tuple[int, bytes]]) -> list[tuple[int, dict[str, Any]]]:
    """Server-sent events of a stream, each with the time at which its last byte came."""
    found: list[tuple[int, dict[str, Any]]] = []
    rest = b""
    for when_ns, part in stream:
        *whole, rest = (rest + part).split(b"\n\n")
        for text in whole:
            data = text.removeprefix(b"data: ")
            if data.startswith(b"{"):
                found.append((when_ns, json.loads(data)))
    return found


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    first_ms = statistics.median(run["first_ms"] for run in runs)
    sums = {key: sum(run[key] for run in runs) for key in ("wall_s", "tokens", "messages")}
    return {**sums, "first_ms": first_ms, "arrived_ns": runs[0]["arrived_ns"] if len(runs) == 1 else []}


def main() -> int:
    parser = argparse.ArgumentParser()
    door = parser.add_mutually_exclusive_group(required=True)
    door.add_argument("--gateway")
    door.add_argument("--http")
    parser.add_argument("--streams", required=True, type=int)
    parser.add_argument("--tokens", required=True, type=int)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--slow-tokens", type=int, default=1)
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    if options.http:
        result = asyncio.run(run_http(options))
    elif options.streams == 1 and options.times == 1:
        result = run_one(options)
    else:
        result = asyncio.run(run(options))
    sys.stdout.write(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
