"""Many short requests through both doors of a gateway, by turns: the HTTP door should keep up with gRPC.

    python -m bench.short_requests [--rounds 3]

1,000 requests of two tokens, 16 at a time, none streamed, from a client process of their own, with ranks that answer
at once. The best of some rounds counts for either door (whatever else runs on the machine only slows). Prints a table;
exit status 1 when HTTP's rate is below its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import grpc

from bench.gateway_alone import gateway
from hetero_api.v1 import inference_pb2 as pb

REQUESTS: Final = 1000
AT_ONCE: Final = 16
TOKENS: Final = 2
LEAST_SHARE: Final = 0.8
"""Of gRPC's rate, by HTTP."""
_WARM_UP: Final = 100
_PROMPT_TOKENS: Final = 16
_GENERATE: Final = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/Generate"
Ask = Callable[[int], Awaitable[int]]
"""Sends the request of a number, and returns how many tokens came."""


def prompt(number: int) -> list[int]:
    """Return a prompt that shares no block with those of other numbers."""
    return [(number * 37 + index) % 1000 for index in range(_PROMPT_TOKENS)]


@asynccontextmanager
async def grpc_door(address: str) -> AsyncIterator[Ask]:
    """Requests over gRPC."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        generate: Any = channel.unary_stream(_GENERATE)

        async def ask(number: int) -> int:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt(number)),
                sampling=pb.SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number),
                output_mode=pb.OUTPUT_MODE_FINAL_ONLY,
            )
            events = [pb.GenerateEvent.FromString(data) async for data in generate(request.SerializeToString())]
            return sum(len(event.delta.token_ids) for event in events)

        yield ask


@asynccontextmanager
async def http_door(address: str) -> AsyncIterator[Ask]:
    """Requests over HTTP."""
    fixed = {"model": "bench", "max_tokens": TOKENS, "ignore_eos": True}
    async with aiohttp.ClientSession(f"http://{address}") as session:

        async def ask(number: int) -> int:
            body = {**fixed, "prompt": prompt(number), "seed": number}
            async with session.post("/v1/completions", json=body) as answer:
                return int((await answer.json())["usage"]["completion_tokens"])

        yield ask


_DOORS: Final = {"grpc": grpc_door, "http": http_door}


async def load(door: str, address: str, count: int) -> float:
    """Send `count` requests, and return the seconds that they took. Raises RuntimeError if tokens are missing."""
    numbers = iter(range(count))
    tokens = 0

    async def work(ask: Ask) -> None:
        nonlocal tokens
        for number in numbers:
            came = await ask(number)
            tokens += came

    async with _DOORS[door](address) as ask:
        began_s = time.monotonic()
        await asyncio.gather(*(work(ask) for _ in range(AT_ONCE)))
        took_s = time.monotonic() - began_s
    if tokens != count * TOKENS:
        raise RuntimeError(f"{tokens} tokens came over {door}, {count * TOKENS} had to")
    return took_s


def measure(rounds: int) -> dict[str, float]:
    """Return each door's rate, requests a second."""
    best = dict.fromkeys(_DOORS, 0.0)
    with gateway(step_ms=0) as running:
        addresses = {"grpc": running.address, "http": running.http_address}
        for turn in range(rounds + 1):
            for door, address in addresses.items():
                count = REQUESTS if turn else _WARM_UP
                rate = count / _load_apart(door, address, count)
                best[door] = max(best[door], rate) if turn else 0.0
    return best


def _load_apart(door: str, address: str, count: int) -> float:
    """Do `load` in another process."""
    command = [
        sys.executable,
        "-m",
        "bench.short_requests",
        f"--door={door}",
        f"--address={address}",
        f"--count={count}",
    ]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(told))


def main() -> int:
    """Measure, or be the client of one load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--door", choices=_DOORS, help="be a client of this door")
    parser.add_argument("--address", default="")
    parser.add_argument("--count", type=int, default=REQUESTS)
    options = parser.parse_args()
    if options.door is not None:
        print(json.dumps(asyncio.run(load(options.door, options.address, options.count))))
        return 0
    rates = measure(options.rounds)
    share = rates["http"] / rates["grpc"]
    holds = share >= LEAST_SHARE
    for door, rate in rates.items():
        print(f"{door:6} {rate:8,.0f} requests/s of {TOKENS} tokens, {AT_ONCE} at a time")
    print(f"HTTP   {share:8.2f} x gRPC's rate  >= {LEAST_SHARE}  {'ok' if holds else 'EXCEEDED'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
