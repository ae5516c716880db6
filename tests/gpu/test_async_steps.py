"""Overlapping steps on a device that really computes beside the host: tokens are those of steps one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.v1.ranks_pb2 import Sampling
from hetero_gateway.engine.request import GenerationRequest
from hetero_worker.backends.cuda.backend import CudaBackend
from tests.support.async_serving import Asked, AsyncRank, random_requests
from tests.support.gpu_needed import skip_without_gpu
from tests.support.quiet_step import WHOLE
from tests.support.random_model import VOCAB_SIZE, save_random_llama

skip_without_gpu()

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gpu() -> CudaBackend:
    platform = CudaBackend(0, pool="test")
    platform.open()
    return platform


def rank_on(gpu: CudaBackend, model: Path, *, async_steps: bool = True, graphs: bool = True) -> AsyncRank:
    return AsyncRank(model, sampler=None, backend=gpu, shares=WHOLE, async_steps=async_steps, enforce_eager=not graphs)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_tokens_are_those_of_steps_one_by_one(gpu: CudaBackend, model: Path, graphs: bool) -> None:
    for seed in (1, 2):
        asked = random_requests(seed, 14, vocabulary=VOCAB_SIZE)
        expected = rank_on(gpu, model, async_steps=False, graphs=graphs).serve(asked)
        assert rank_on(gpu, model, graphs=graphs).serve(asked) == expected


def test_nearly_all_steps_overlap(gpu: CudaBackend, model: Path) -> None:
    asked = [
        Asked(
            GenerationRequest(
                request_id=f"{i}",
                prompt_token_ids=tuple(range(5 + i, 20 + i)),
                sampling=Sampling(seed=i, temperature=float(i % 2)),
                max_tokens=400,
                ignore_eos=True,
            )
        )
        for i in range(6)
    ]
    rank = AsyncRank(model, sampler=None, backend=gpu, shares=WHOLE, num_blocks=700)
    rank.serve(asked)
    summary = rank.runner._times.summary()
    assert summary is not None
    assert summary.overlapped_share > 0.95
