"""A gateway with a router's door, and calls of its service as a router makes them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hetero_gateway.engine.text.tokenizer import TextTokenizer
from hetero_gateway.server.gateway import Ports
from tests.unit.server.server_setup import GatewayBench, write_model

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]


def read_tokenizer() -> TextTokenizer:
    """The tokenizer of every bench."""
    with tempfile.TemporaryDirectory() as folder:
        return TextTokenizer.from_directory(write_model(Path(folder)))


class RouterBench(GatewayBench):
    """A gateway that a router may call."""

    ports = Ports("127.0.0.1", inference=0, admin=0, ranks=0, http=0, router=0)

    def engine(self) -> EngineCalls:
        return EngineCalls(self.channel(self.addresses.router))


class EngineCalls:
    """The service's methods, under their names."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        method = SERVICE.methods_by_name[name]
        make: Any = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        answer = GetMessageClass(method.output_type)
        return make(
            f"/{SERVICE.full_name}/{name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=answer.FromString,
        )


def generate(prompt: list[int], *, request_id: str = "r", stream: bool = True, **params: Any) -> vllm.GenerateRequest:
    """A request as a router sends it."""
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(original_text="", input_ids=prompt),
        sampling_params=vllm.SamplingParams(**({"max_tokens": 8} | params)),
        stream=stream,
    )
