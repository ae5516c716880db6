"""What gRPC itself costs between a rank and a client: a gateway's wires without a gateway.

    python -m bench.bare_relay --state-file PATH

Answers Generate like a gateway with one stream at a time, but the plans that it sends are always the same and the
rank's answer is passed on as it comes. The file tells its addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc

from hetero_api.v1 import inference_pb2, ranks_pb2

_INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_RANKS: Final = ranks_pb2.DESCRIPTOR.services_by_name["Ranks"].full_name
_AHEAD: Final = 2


class Relay:
    """One rank, one stream."""

    def __init__(self) -> None:
        self._plans: asyncio.Queue[bytes] = asyncio.Queue()
        self._results: asyncio.Queue[ranks_pb2.StepResult] = asyncio.Queue()

    async def join(self, said: AsyncIterator[ranks_pb2.RankMessage], _: Any) -> AsyncIterator[bytes]:
        reading = asyncio.create_task(self._read(said))
        try:
            while True:
                yield await self._plans.get()
        finally:
            reading.cancel()

    async def _read(self, said: AsyncIterator[ranks_pb2.RankMessage]) -> None:
        async for message in said:
            if message.HasField("step_result"):
                for result in (message.step_result, *message.further_results):
                    self._results.put_nowait(result)

    async def generate(self, request: inference_pb2.GenerateRequest, _: Any) -> AsyncIterator[bytes]:
        for step in range(request.sampling.max_tokens + _AHEAD):
            if step < request.sampling.max_tokens:
                plan = ranks_pb2.StepPlan(step_id=step + 1, decode_slots=[0])
                self._plans.put_nowait(ranks_pb2.GatewayMessage(epoch=1, step_plan=plan).SerializeToString())
            if step >= _AHEAD:
                delta = inference_pb2.Delta(token_ids=(await self._results.get()).token_ids, text="text")
                yield inference_pb2.GenerateEvent(delta=delta).SerializeToString()


async def serve(state_file: Path) -> None:
    relay, server = Relay(), grpc.aio.server()
    generate: Any = grpc.unary_stream_rpc_method_handler(
        relay.generate, request_deserializer=inference_pb2.GenerateRequest.FromString
    )
    join: Any = grpc.stream_stream_rpc_method_handler(relay.join, request_deserializer=ranks_pb2.RankMessage.FromString)
    handlers = (
        grpc.method_handlers_generic_handler(_INFERENCE, {"Generate": generate}),
        grpc.method_handlers_generic_handler(_RANKS, {"Join": join}),
    )
    server.add_generic_rpc_handlers(handlers)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    whole = state_file.with_suffix(".new")
    whole.write_text(json.dumps({"pid": os.getpid(), "inference": address, "ranks": address}), encoding="utf-8")
    whole.rename(state_file)
    await server.wait_for_termination()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-file", required=True, type=Path)
    asyncio.run(serve(parser.parse_args().state_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
