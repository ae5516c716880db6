"""Chained steps on a device that really computes beside the host: tokens are those of steps one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.v1.ranks_pb2 import Sampling
from hetero_gateway.engine.request import GenerationRequest
from hetero_worker.backends.cuda.device import CudaPlatform
from hetero_worker.layers.drawing_choice import drawing_for
from hetero_worker.runners.graphs.device_steps import graphs_of
from tests.support.chained_serving import Asked, ChainedRank, FullTrust, MisleadingDrawing, random_requests
from tests.support.gpu_needed import skip_without_gpu
from tests.support.quiet_step import WHOLE
from tests.support.random_model import VOCAB_SIZE, save_random_llama

skip_without_gpu()

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gpu() -> CudaPlatform:
    platform = CudaPlatform(0, pool="test")
    platform.open()
    return platform


def rank_on(
    gpu: CudaPlatform, model: Path, *, chained: bool = True, wrong: float | None = None, graphs: bool = True
) -> ChainedRank:
    """`wrong` None: the rank's own drawing as it is."""
    return ChainedRank(
        model,
        drawing=None if wrong is None else MisleadingDrawing(drawing_for(gpu), wrong=wrong),
        platform=gpu,
        shares=WHOLE,
        chained=chained,
        enforce_eager=not graphs,
        trust=FullTrust(),
    )


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_tokens_are_those_of_steps_one_by_one(gpu: CudaPlatform, model: Path, wrong: float, graphs: bool) -> None:
    assert graphs_of(gpu.device) is not None
    for seed in (1, 2):
        asked = random_requests(seed, 14, vocabulary=VOCAB_SIZE)
        expected = rank_on(gpu, model, chained=False, graphs=graphs).serve(asked)
        assert rank_on(gpu, model, wrong=wrong, graphs=graphs).serve(asked) == expected


def test_guesses_of_a_device_come_true(gpu: CudaPlatform, model: Path) -> None:
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
    rank = ChainedRank(model, drawing=None, platform=gpu, shares=WHOLE, num_blocks=700, trust=FullTrust())
    rank.serve(asked)
    summary = rank.runner._times.summary()
    assert summary is not None
    assert summary.chained_share > 0.95
    assert summary.num_remade <= 4, "of some 2,400 draws"
