"""Clients of a gateway in a process of their own: many streams at once, as cheap as they can be.

    python -m bench.stream_load --gateway HOST:PORT --streams N --tokens N [--slow N]

Messages are kept as bytes while the clock runs and read afterwards. Prints one JSON object: `wall_s`, from the first
call to the end of the last; `tokens` and `messages`, how many came; with one stream also `arrived_ns`, when each token
came. `--slow` streams more read a message a second, and are not waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any, Final

import grpc

from hetero_api.v1 import inference_pb2 as pb

_GENERATE: Final = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
_PROMPT_TOKENS: Final = 16
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
    return summary([came], wall_s=wall_s)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(options.gateway, options=_SETTINGS) as channel:
        generate: Any = channel.unary_stream(_GENERATE)
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
    return summary(came, wall_s=wall_s)


def summary(came: list[list[tuple[int, bytes]]], *, wall_s: float) -> dict[str, Any]:
    arrived_ns: list[int] = []
    messages = 0
    for stream in came:
        for when_ns, payload in stream:
            event = pb.GenerateEvent.FromString(payload)
            messages += event.HasField("delta")
            arrived_ns += [when_ns] * len(event.delta.token_ids)
    return {
        "wall_s": wall_s,
        "tokens": len(arrived_ns),
        "messages": messages,
        "arrived_ns": arrived_ns if len(came) == 1 else [],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--streams", required=True, type=int)
    parser.add_argument("--tokens", required=True, type=int)
    parser.add_argument("--slow", type=int, default=0)
    parser.add_argument("--slow-tokens", type=int, default=1)
    options = parser.parse_args()
    result = run_one(options) if options.streams == 1 else asyncio.run(run(options))
    sys.stdout.write(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
