"""Adapters of a real group: PEFT's tokens under load, while others come and go, and after a rank was killed.

They come from a folder and from the Hub, by URI, and from folders that an administrator names.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.lora_adapters import SavedAdapter, save_adapter
from tests.support.reference import TIE_FP32, Reference
from tests.support.stand_in_hub import StandInHub
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [[17, 3, 250, 88, 9, 61, 199, 42], [5, 120, 33, 71, 200], [1, 2, 3]]
NUM_TOKENS = 12
LOADS = 1000
ASKERS = 4
WARM_UP = 3500
"""Requests before memory is looked at: a gateway's native memory grows for the first 3,000, by 4 KB each."""
MOST_BYTES_A_LOAD = 1000
"""Growth of a process that counts as none. An adapter has 500,000 bytes in 42 tensors."""


def disagreements(logits: torch.Tensor, num_prompt: int, completion: Sequence[int]) -> list[int]:
    """Positions where greedy decoding would not have chosen the completion's token, near ties aside."""
    own = logits[num_prompt - 1 : num_prompt - 1 + len(completion)]
    gaps = own.max(1).values - own.gather(1, torch.tensor(list(completion))[:, None])[:, 0]
    return torch.nonzero(gaps > TIE_FP32)[:, 0].tolist()


def completed(stub: Any, model: str, prompt: list[int]) -> list[int]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), model=model, sampling=sampling)
    return [token for event in stub.Generate(asked, timeout=60) for token in event.delta.token_ids]


def published(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


def test_requests_of_adapters_get_peft_s_tokens(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    adapters: dict[str, SavedAdapter] = {
        name: save_adapter(model, tmp_path / "adapters" / name, modules=modules, rank=rank, seed=rank)
        for name, modules, rank in (("all", ALL, 8), ("some", ("q_proj", "v_proj"), 4), ("mlp", ("down_proj",), 16))
    }
    reference = Reference.from_directory(model)
    (tmp_path / "adapters" / "all").rename(tmp_path / "elsewhere")
    by_uri = [{"name": "all", "uri": f"file://{tmp_path}/elsewhere"}, {"name": "some", "uri": "hf://org/some"}]
    spec = {"maxLoaded": 2, "roots": [str(tmp_path / "adapters")], "load": by_uri, "overHttp": True}
    manifest = write_manifest(tmp_path, model=model, ranks=2, max_model_len=256, engine={"adapters": spec})

    def check(stub: Any, name: str, prompt: list[int]) -> None:
        tokens = completed(stub, name, prompt)
        source = adapters.get(name, reference)
        wrong = disagreements(source.logits([*prompt, *tokens[:-1]]), len(prompt), tokens)
        assert not wrong, (name, prompt, tokens, wrong)

    with ExitStack() as stack:
        hub = stack.enter_context(StandInHub("org/some", published(adapters["some"].directory)))
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1"}
        group = stack.enter_context(LocalGroupProcess(manifest, home=tmp_path / "home", environment=environment))
        pool = stack.enter_context(ThreadPoolExecutor(8))

        def together(*names: str) -> None:
            with grpc.insecure_channel(group.record.inference, options=[("grpc.enable_http_proxy", 0)]) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                list(pool.map(lambda each: check(stub, *each), [(name, p) for name in names for p in PROMPTS]))

        with group.admin() as admin:
            assert list(admin.adapters()) == ["all", "some"]
            together("all", "test", "some")
            asked = pool.submit(together, "all", "test")
            for _ in range(5):
                admin.unload_adapter("some")
                admin.load_adapter("some", str(tmp_path / "adapters" / "mlp"))
                admin.unload_adapter("some")
                admin.load_adapter("some", str(tmp_path / "adapters" / "some"))
            asked.result()
            # More than ranks have memory for: they take turns.
            admin.load_adapter("mlp", str(tmp_path / "adapters" / "mlp"))
            together("all", "mlp", "test", "some")
            epoch = admin.topology().epoch
            victim = next(pid for name, pid in group.record.processes.items() if name != "gateway")
            os.kill(victim, signal.SIGKILL)
            group.wait_ready_again(after_epoch=epoch)
            assert list(admin.adapters()) == ["all", "mlp", "some"]
            together("all", "test", "some", "mlp")


def test_requests_get_peft_s_tokens_of_adapters_of_experts_beside_others(tmp_path: Path) -> None:
    """Steps with them are recorded as others are, those before them included."""
    model, roots = save_tiny_model(tmp_path / "model", "qwen3-moe"), tmp_path / "adapters"
    stacks = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    plain = save_adapter(model, roots / "plain", modules=("q_proj", "o_proj"), rank=4)
    experts = save_adapter(model, roots / "experts", modules=("o_proj",), rank=4, target_parameters=stacks, seed=1)
    sources: dict[str, Any] = {"test": Reference.from_directory(model), "plain": plain, "experts": experts}
    spec = {"maxLoaded": 2, "roots": [str(roots)], "experts": True}
    manifest = write_manifest(tmp_path, model=model, ranks=2, max_model_len=256, engine={"adapters": spec})

    with ExitStack() as stack:
        group = stack.enter_context(LocalGroupProcess(manifest, home=tmp_path / "home"))
        admin, pool = stack.enter_context(group.admin()), stack.enter_context(ThreadPoolExecutor(8))
        channel = grpc.insecure_channel(group.record.inference, options=[("grpc.enable_http_proxy", 0)])
        stub = inference_pb2_grpc.InferenceStub(stack.enter_context(channel))
        admin.load_adapter("plain", str(roots / "plain"))
        for names in (("plain",), ("plain", "test"), ("plain", "test", "experts"), ("experts",), ("plain", "test")):
            if "experts" in names and "experts" not in admin.adapters():
                admin.load_adapter("experts", str(roots / "experts"))
            asked = [(name, prompt) for name in names for prompt in PROMPTS]
            answers = pool.map(lambda each: completed(stub, *each), asked)
            for (name, prompt), tokens in zip(asked, answers, strict=True):  # PEFT computes on one thread at a time
                wrong = disagreements(sources[name].logits([*prompt, *tokens[:-1]]), len(prompt), tokens)
                assert not wrong, (name, prompt, tokens, wrong)


def test_a_thousand_loads_under_load_leave_memory_as_it_was(tmp_path: Path) -> None:
    model, roots = save_tiny_model(tmp_path / "model", "llama"), tmp_path / "adapters"
    for seed, name in enumerate(("kept", "odd", "even"), start=1):
        save_adapter(model, roots / name, modules=ALL, rank=16, seed=seed)
    load = [{"name": "kept", "directory": str(roots / "kept")}]
    spec = {"maxLoaded": 2, "roots": [str(roots)], "load": load}
    manifest = write_manifest(tmp_path, model=model, ranks=2, max_model_len=256, engine={"adapters": spec})
    warm, over = threading.Event(), threading.Event()
    resident = dict[str, list[int]]()

    def ask(stub: Any, name: str) -> int:
        """Ask again and again, until it is over; return how often."""
        first = [completed(stub, name, prompt) for prompt in PROMPTS]
        for number in itertools.count(len(PROMPTS)):
            if over.is_set():
                return number
            if number > WARM_UP / ASKERS:
                warm.set()
            at = number % len(PROMPTS)
            assert completed(stub, name, PROMPTS[at]) == first[at], (name, number)
        raise AssertionError("it counts for ever")

    with ExitStack() as stack:
        group = stack.enter_context(LocalGroupProcess(manifest, home=tmp_path / "home"))
        admin = stack.enter_context(group.admin())
        channel = grpc.insecure_channel(group.record.inference, options=[("grpc.enable_http_proxy", 0)])
        stub = inference_pb2_grpc.InferenceStub(stack.enter_context(channel))
        pool = stack.enter_context(ThreadPoolExecutor(ASKERS))
        stack.callback(over.set)
        asking = [pool.submit(ask, stub, ("test", "kept")[number % 2]) for number in range(ASKERS)]
        assert warm.wait(300) or [each.result(0) for each in asking]
        processes = {name: psutil.Process(pid) for name, pid in group.record.processes.items()}
        answers: dict[str, list[int]] = {}
        for number in range(LOADS):
            source = ("even", "odd")[number % 2]
            admin.load_adapter("passing", str(roots / source))
            if number % 10 < 2:
                answer = completed(stub, "passing", PROMPTS[0])
                assert answers.setdefault(source, answer) == answer, number
            admin.unload_adapter("passing")
            if number % 10 == 0 and number >= LOADS / 10:
                for name, process in processes.items():
                    resident.setdefault(name, []).append(process.memory_info().rss)
        over.set()
        asked = [each.result() for each in asking]
        assert group.record.processes == {name: process.pid for name, process in processes.items()}
    assert min(asked) > WARM_UP / ASKERS + LOADS / 20, asked
    assert answers["odd"] != answers["even"]
    growth = {name: statistics.linear_regression(range(len(rss)), rss).slope / 10 for name, rss in resident.items()}
    print(f"bytes a load: {growth}; requests: {sum(asked)}")
    assert all(each < MOST_BYTES_A_LOAD for each in growth.values()), (growth, resident)
