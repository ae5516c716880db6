"""A whole gateway in this process: real gRPC servers on loopback ports, ranks that compute with WarmRanks.

The model is nothing but a shape and a byte-level tokenizer: 256 byte tokens, then <eos> (256) and <unused> (257).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Self

import grpc
import yaml
from opentelemetry.trace import Tracer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_api.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc, ranks_pb2, ranks_pb2_grpc
from hetero_gateway.group.recovery import HEARTBEAT_INTERVAL_S
from hetero_gateway.server.access.files import AccessFiles
from hetero_gateway.server.config import ServedModel, read_model
from hetero_gateway.server.gateway import Addresses, Gateway, Ports
from hetero_worker.process.gateway_link import one_by_one
from tests.unit.group.group_setup import PATIENCE_S, SMOLLM2, WarmRanks, hello, wait_until

TOKEN = "the-token"
VOCAB_SIZE = 258
MAX_MODEL_LEN = 64
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def write_model(directory: Path, **shape: Any) -> Path:
    """config.json, tokenizer.json and a chat template; no weights."""
    shape = SMOLLM2 | {"vocab_size": VOCAB_SIZE, "eos_token_id": 256} | shape
    (directory / "config.json").write_text(json.dumps(shape))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def write_manifest(path: Path, **spec: Any) -> Path:
    body = {
        "model": {"uri": "hf://org/model", "maxModelLen": MAX_MODEL_LEN},
        "pools": [{"name": "cpu", "type": "CPU", "ranks": 1}],
        "engine": {"blockSize": 4, "maxNumSeqs": 2, "maxNumBatchedTokens": 64},
        "gateway": {"maxQueuedRequests": 1},
    }
    head = {"apiVersion": "heteroinference.io/v1alpha1", "kind": "HeteroInference", "metadata": {"name": "g"}}
    path.write_text(yaml.safe_dump(head | {"spec": body | spec}))
    return path


def served_model(folder: Path, **spec: Any) -> ServedModel:
    return read_model(write_manifest(folder / "g.yaml", **spec), write_model(folder))


class GrpcRank:
    """An obedient rank over a real Join stream. Clear `may_step` to make it hold its steps."""

    def __init__(self, channel: grpc.aio.Channel, model: ServedModel, *, token: str = TOKEN) -> None:
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.num_plans = 0
        self.kinds: list[str] = []
        self.epoch = 0
        self._settings = model.group_settings
        self._metadata = ((AUTHORIZATION_KEY, f"Bearer {token}"),)
        self._stub = ranks_pb2_grpc.RanksStub(channel)
        self._ranks: WarmRanks | None = None
        self._writing = asyncio.Lock()
        self._orders: asyncio.Queue[ranks_pb2.GatewayMessage] = asyncio.Queue()

    def say(self, token_ids: list[int]) -> None:
        """Have every sequence generate these tokens, and then the end."""
        assert self._ranks is not None
        self._ranks.script = [*token_ids, 256]

    def forget_script(self) -> None:
        """Have sequences generate what they would without `say`."""
        assert self._ranks is not None
        self._ranks.script = ()

    async def live(self, **changes: Any) -> None:
        """From Hello to the stream's end; raises what the stream ends with."""
        call: Any = self._stub.Join(metadata=self._metadata)
        first = hello(0, model_fingerprint=self._settings.model_fingerprint, **changes)
        await call.write(ranks_pb2.RankMessage(hello=first))
        worker = asyncio.create_task(self._work(call))
        heart = asyncio.create_task(self._beat(call))
        try:
            async for message in call:
                self.kinds.append(message.WhichOneof("body"))
                self.epoch = message.epoch
                for each in one_by_one(message):
                    self._orders.put_nowait(each)
        finally:
            worker.cancel()
            heart.cancel()
            call.cancel()

    async def _beat(self, call: Any) -> None:
        while True:
            if self.epoch:
                await self._write(call, ranks_pb2.RankMessage(epoch=self.epoch, heartbeat=ranks_pb2.Heartbeat()))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _work(self, call: Any) -> None:
        while True:
            message = await self._orders.get()
            kind = message.WhichOneof("body") or ""
            answer = await self._answer(kind, getattr(message, kind))
            if answer is not None:
                answer.epoch = message.epoch
                await self._write(call, answer)

    async def _answer(self, kind: str, order: Any) -> ranks_pb2.RankMessage | None:
        match kind:
            case "form_group":
                return ranks_pb2.RankMessage(formed=ranks_pb2.Formed(exchange=order.exchange))
            case "load_model":
                loaded = ranks_pb2.Loaded(
                    weight_bytes=1, kv_budget_bytes=1 << 24, kv_bytes_per_token=8, local_memory_percent=97
                )
                return ranks_pb2.RankMessage(loaded=loaded)
            case "allocate_cache":
                self._ranks = WarmRanks(
                    num_blocks=order.num_blocks, block_size=order.block_size, vocab_size=VOCAB_SIZE, max_num_seqs=64
                )
                return ranks_pb2.RankMessage(allocated=ranks_pb2.Allocated(kv_bytes=1))
            case "step_plan":
                self.num_plans += 1
                await self.may_step.wait()
                assert self._ranks is not None
                if not order.HasField("command"):
                    masks = await self._masks_of(order)
                    return ranks_pb2.RankMessage(step_result=self._ranks.execute(order, masks=masks))
                report = self._ranks.obey(order.step_id, order.command)
                result = ranks_pb2.StepResult(step_id=order.step_id, command_report=report)
                return ranks_pb2.RankMessage(step_result=result)
        return None

    async def _write(self, call: Any, message: ranks_pb2.RankMessage) -> None:
        # gRPC takes one write at a time.
        async with self._writing:
            await call.write(message)

    async def _masks_of(self, plan: ranks_pb2.StepPlan) -> list[bytes]:
        """They come before any later plan."""
        if not plan.masked_slots:
            return []
        order = await self._orders.get()
        assert order.token_masks.step_id == plan.step_id
        return list(order.token_masks.masks)


class GatewayBench:
    """A gateway that listens. `join` makes it ready."""

    def __init__(
        self,
        model: ServedModel,
        *,
        admin_token: str | None = None,
        files: AccessFiles | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.model = model
        self.gateway = Gateway(model, token=TOKEN, admin_token=admin_token, files=files, tracer=tracer)
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._addresses: Addresses | None = None
        self._closed = False

    ports = Ports("127.0.0.1", inference=0, admin=0, ranks=0, http=0)

    async def __aenter__(self) -> Self:
        self._addresses = await self.gateway.listen(self.ports)
        self.serving = self.serve()
        return self

    def serve(self) -> asyncio.Task[Any]:
        """The gateway's life as a task."""
        return asyncio.create_task(self.gateway.serve())

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def close(self) -> None:
        """Stop the gateway as SIGTERM does."""
        if not self._closed:
            self._closed = True
            self.serving.cancel()
            await asyncio.wait((self.serving,))
            await self.gateway.close("the gateway is shutting down")

    @property
    def addresses(self) -> Addresses:
        assert self._addresses is not None
        return self._addresses

    def channel(self, address: str) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._channels.append(channel)
        return channel

    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel(self.addresses.inference))

    def admin(self) -> Any:
        return admin_pb2_grpc.AdminStub(self.channel(self.addresses.admin))

    def new_rank(self, *, token: str = TOKEN) -> GrpcRank:
        return GrpcRank(self.channel(self.addresses.ranks), self.model, token=token)

    async def join(self) -> tuple[GrpcRank, asyncio.Task[None]]:
        """A rank that makes the gateway ready, and its life: cancel it to lose the rank."""
        rank = self.new_rank()
        life = asyncio.create_task(rank.live())
        self._tasks.append(life)
        await self.until(lambda: self.gateway.group.is_ready)
        return rank, life

    async def until(self, condition: Any) -> None:
        await wait_until(condition)


def sampling(**fields: Any) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(**fields)


def request(prompt: Any = "hello", **fields: Any) -> inference_pb2.GenerateRequest:
    """A text prompt, or token ids when `prompt` is a list."""
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(text=prompt, **fields)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), **fields)


async def read_all(call: Any) -> list[Any]:
    """The messages that are left of a server's stream. Raises what the call ended with."""
    messages = []
    async with asyncio.timeout(PATIENCE_S):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    return messages
