"""A rank that computes nothing and answers at once: what a gateway costs shows when nothing else does.

    python -m bench.answering_rank --gateway HOST:PORT --fingerprint HEX --vocabulary N [--step-ms MS]

It joins over a real Ranks.Join stream, with the group's token in HETERO_GROUP_TOKEN_FILE, and draws tokens from a list
that reads like text. On SIGTERM it leaves, and prints the times (time.monotonic_ns) at which it answered each step that
sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc

from hetero_api.contract import AUTHORIZATION_KEY, ENV_GROUP_TOKEN_FILE, VERSION
from hetero_api.v1 import ranks_pb2 as pb
from hetero_worker.process.gateway_link import one_by_one

_JOIN: Final = f"/{pb.DESCRIPTOR.services_by_name['Ranks'].full_name}/Join"
_KEPT_ANSWERS: Final = 100_000
_BEATS_EVERY_S: Final = 0.5


class AnsweringRank:
    """One life, from Hello to the stream's end."""

    def __init__(self, call: Any, *, vocabulary: int, step_s: float) -> None:
        self.answered_ns: deque[int] = deque(maxlen=_KEPT_ANSWERS)
        self._call = call
        self._vocabulary = vocabulary
        self._step_s = step_s
        self._epoch = 0
        self._writing = asyncio.Lock()
        self._draws = 0

    async def live(self, hello: pb.Hello) -> None:
        await self._say(pb.RankMessage(hello=hello))
        beating = asyncio.create_task(self._beat())
        try:
            async for payload in self._call:
                message = pb.GatewayMessage.FromString(payload)
                self._epoch = message.epoch
                for each in one_by_one(message):
                    await self._obey(each)
        finally:
            beating.cancel()

    async def _obey(self, message: pb.GatewayMessage) -> None:
        match message.WhichOneof("body"):
            case "step_plan":
                await self._step(message.step_plan)
            case "form_group":
                exchange = message.form_group.exchange
                await self._say(pb.RankMessage(epoch=self._epoch, formed=pb.Formed(exchange=exchange)))
            case "load_model":
                loaded = pb.Loaded(weight_bytes=1, kv_budget_bytes=1 << 30, kv_bytes_per_token=512)
                await self._say(pb.RankMessage(epoch=self._epoch, loaded=loaded))
            case "allocate_cache":
                await self._say(pb.RankMessage(epoch=self._epoch, allocated=pb.Allocated(kv_bytes=1)))

    async def _step(self, plan: pb.StepPlan) -> None:
        if self._step_s:
            await asyncio.sleep(self._step_s)
        slots = [*plan.decode_slots, *(span.slot for span in plan.spans if span.sample)]
        self._draws += 1
        first = 1000 + 7 * self._draws
        token_ids = [(first + 31 * slot) % self._vocabulary for slot in slots]
        result = pb.StepResult(step_id=plan.step_id, slots=slots, token_ids=token_ids)
        message = pb.RankMessage(epoch=self._epoch, step_result=result)
        if slots:
            self.answered_ns.append(time.monotonic_ns())
        await self._say(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEATS_EVERY_S)
            await self._say(pb.RankMessage(epoch=self._epoch, heartbeat=pb.Heartbeat()))

    async def _say(self, message: pb.RankMessage) -> None:
        async with self._writing:
            await self._call.write(message.SerializeToString())


_SPEEDS = pb.DeviceSpeeds(memory_bandwidth=1e10, matmul=[pb.MatmulRate(dtype="float32", flops=1e11)])
"""Some, which the gateway predicts from."""


def hello(fingerprint: str) -> pb.Hello:
    return pb.Hello(
        pool="cpu",
        pod_name="answering",
        host_id="bench",
        instance_id="one",
        version=VERSION,
        model_fingerprint=fingerprint,
        store_address="127.0.0.1:1",
        device=pb.DeviceReport(kind=pb.DEVICE_KIND_CPU, name="none", memory_bytes=1 << 34, speeds=_SPEEDS),
    )


async def run(options: argparse.Namespace, token: str) -> int:
    async with grpc.aio.insecure_channel(options.gateway, options=[("grpc.enable_http_proxy", 0)]) as channel:
        join: Any = channel.stream_stream(_JOIN)
        call = join(metadata=((AUTHORIZATION_KEY, f"Bearer {token}"),))
        rank = AnsweringRank(call, vocabulary=options.vocabulary, step_s=options.step_ms / 1000)
        life = asyncio.create_task(rank.live(hello(options.fingerprint)))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, life.cancel)
        await asyncio.wait((life,))
    with suppress(BrokenPipeError):  # only the latency load reads it
        sys.stdout.write("\n".join(map(str, rank.answered_ns)))
        sys.stdout.flush()
    return 0 if life.cancelled() or life.exception() is None else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--vocabulary", required=True, type=int)
    parser.add_argument("--step-ms", type=float, default=0.0)
    token = Path(os.environ[ENV_GROUP_TOKEN_FILE]).read_text(encoding="ascii").strip()
    return asyncio.run(run(parser.parse_args(), token))


if __name__ == "__main__":
    sys.exit(main())
