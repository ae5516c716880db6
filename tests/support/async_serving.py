"""A GPU rank alone behind the gateway's scheduler, with steps that overlap or not; the device is played, or real.

Steps go out as a gateway sends them, two ahead. Nobody looks whether the device is done, so every step that may follow
another begins before that is finished. The outcome is the requests' tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.speculation.speculator import NO_SPECULATION, Speculator
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.distributed.staging import StreamStaging
from hetero_worker.layers.sampler import SampleTokens, sample_tokens
from hetero_worker.memory.streams import HOST
from hetero_worker.process.async_steps import AsyncSteps
from hetero_worker.runners.base import LoadRequest, StepOutput
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.sampling.base import ShardSampler
from hetero_worker.sampling.device import DeviceSampler
from hetero_worker.sampling.device_kernels import SamplingKernels, TorchSamplingKernels
from tests.support.played_device import PlayedDevice
from tests.support.pseudo_gpu import MakeGraphs, PseudoGpu
from tests.support.rank_shares import Shares
from tests.unit.engine.engine_setup import has_requests

MAX_SEQS, MAX_TOKENS, BLOCK_SIZE = 6, 24, 4
WHOLE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))


def late_sampler(kernels: SamplingKernels | None = None) -> ShardSampler:
    """Return a device's sampler whose numbers reach the host when somebody waits for them, and not before."""
    return DeviceSampler(HOST, kernels or TorchSamplingKernels(), StreamStaging(PlayedDevice()).start_to_host)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and in which turn of the gateway it comes."""

    request: GenerationRequest
    turn: int = 0


@dataclass
class AsyncRank:
    """A rank that serves requests. `said` are its steps in their order: "begin N", "answer N"."""

    directory: Path
    sampler: ShardSampler | None = field(default_factory=late_sampler)
    """None: the rank's own choice."""
    backend: DeviceBackend | None = None
    """None: a pseudo GPU, which records by `make_graphs`."""
    shares: Shares = WHOLE
    async_steps: bool = True
    enforce_eager: bool = False
    make_graphs: MakeGraphs | None = None
    sample: SampleTokens = sample_tokens
    num_blocks: int = 40
    speculator: Speculator = NO_SPECULATION
    has_prediction_head: bool = False
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = PlanRunner(self.backend or PseudoGpu(make_graphs=self.make_graphs), sample=self.sample)
        self.runner.attach(LocalExchange())
        self.report = self.runner.load(self.load_request)
        if self.sampler is not None:
            self.runner._sampler = self.sampler
        self.runner.allocate(self.num_blocks, BLOCK_SIZE)
        self.results: deque[ranks_pb2.StepResult] = deque()
        self.steps = AsyncSteps(self.runner, self._answer)

    @property
    def load_request(self) -> LoadRequest:
        config = ModelConfig.from_directory(self.directory)
        return LoadRequest(
            directory=self.directory,
            config=config,
            dtype="float32",
            shard_plan=self.shares.plan(config.num_layers),
            rank=0,
            max_model_len=config.max_position,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=MAX_SEQS,
            memory_bytes=self.runner.backend.memory_bytes,
            enforce_eager=self.enforce_eager,
            async_steps=self.async_steps,
            has_prediction_head=self.has_prediction_head,
        )

    def serve(self, asked: Iterable[Asked], *, steps_ahead: int = 2) -> Mapping[str, list[int]]:
        """All requests' output tokens, by request id; "ID/1" and so on for completions but the first."""
        scheduler = Scheduler(self._engine(steps_ahead), num_blocks=self.num_blocks, speculator=self.speculator)
        coming = deque(sorted(asked, key=lambda each: each.turn))
        tokens: dict[str, list[int]] = {}
        in_flight = StepsInFlight()
        turn = 0
        while coming or in_flight or not scheduler.is_idle:
            while coming and (coming[0].turn <= turn or not (in_flight or has_requests(scheduler))):
                scheduler.add(coming.popleft().request, now=0.0)
            while (step := scheduler.schedule(0.0, in_flight=in_flight)) is not None:
                in_flight.submit(step)
                self.begin(step.plan)
            if not self.results:
                self.steps.finish()
            answered = in_flight.answer(self.results.popleft())
            in_flight.take()
            assert answered.result is not None
            for update in scheduler.apply(answered.step, answered.result).updates:
                name = f"{update.completion.request.request_id}/{update.completion.index}"
                tokens.setdefault(name, []).append(update.token_id)
            turn += 1
        self.steps.finish()
        return tokens

    def begin(self, plan: ranks_pb2.StepPlan) -> None:
        self.said.append(f"begin {plan.step_id}")
        self.steps.begin(plan)

    def _answer(self, plan: ranks_pb2.StepPlan, output: StepOutput) -> None:
        self.said.append(f"answer {plan.step_id}")
        self.results.append(
            ranks_pb2.StepResult(
                step_id=plan.step_id,
                slots=[token.slot for token in output.sampled],
                token_ids=[token.token for token in output.sampled],
                logprobs=output.logprobs,
                prompt_logprobs=output.prompt_logprobs,
                drafts=output.drafts,
            )
        )

    def _engine(self, steps_ahead: int) -> EngineConfig:
        request = self.load_request
        return EngineConfig(
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            block_size=BLOCK_SIZE,
            max_model_len=request.max_model_len,
            max_queued_requests=1000,
            enable_prefix_caching=True,
            eos_token_ids=frozenset({2}),
            vocab_size=request.config.vocab_size,
            max_steps_in_flight=steps_ahead,
        )


def random_requests(seed: int, number: int, *, vocabulary: int) -> list[Asked]:
    """Of every kind of draw, some with a common prefix, some in several completions, some that end early."""
    random = Random(seed)
    common = [random.randrange(3, vocabulary) for _ in range(2 * BLOCK_SIZE)]
    asked = []
    for index in range(number):
        prompt = [random.randrange(3, vocabulary) for _ in range(random.randint(1, 30))]
        request = GenerationRequest(
            request_id=f"{index}",
            prompt_token_ids=tuple(common + prompt if random.random() < 0.4 else prompt),
            sampling=random_sampling(random),
            max_tokens=random.randint(1, 25),
            stop_token_ids=frozenset(random.sample(range(vocabulary), 8)),
            n=random.choice([1, 1, 1, 2]),
        )
        asked.append(Asked(request, turn=random.randrange(3 * number)))
    return asked


def random_sampling(random: Random) -> ranks_pb2.Sampling:
    plain = {"seed": random.randrange(1 << 40), "temperature": random.choice([0.0, 0.0, 0.7, 1.3])}
    return ranks_pb2.Sampling(**plain | _KINDS[random.randrange(len(_KINDS))])


_KINDS: list[dict[str, Any]] = [
    *[{}] * 16,
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 1.2, "min_p": 0.05, "top_p": 0.95},
    {"bias_token_ids": [5, 9], "biases": [3.0, -4.0]},
    {"min_tokens": 6},
    {"presence_penalty": 0.6},
    {"repetition_penalty": 1.4, "temperature": 0.8},
    {"num_logprobs": 2},
    {"num_prompt_logprobs": 1},
]
