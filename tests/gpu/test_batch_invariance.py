"""Batch-invariant mode on a GPU: a request's numbers are the same to the last bit in any company, on every way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hetero_api.model_parts import ExpertsConfig, Routing
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.kernels.expert_choice import RouterWeights, choose
from hetero_worker.layers.fused_ops import PLAIN_OPS
from tests.support.asked_again import asked, body, differing
from tests.support.gpu_needed import skip_without_gpu
from tests.support.quiet_step import WHOLE
from tests.support.random_model import save_random_llama
from tests.support.rank_processes import run_ranks
from tests.support.rank_shares import Shares

skip_without_gpu()

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "CPU ranks on MLP only": Shares(
        kv_heads=((8, 0, 0),), mlp_columns=((192, 100, 28),), vocab_rows=(320, 0, 0)
    ),
    "CPU ranks with heads": Shares(
        kv_heads=((5, 1, 2),), mlp_columns=((192, 128, 0),), vocab_rows=(192, 0, 128)
    ),
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def gpu() -> CudaBackend:
    platform = CudaBackend(0, pool="test")
    platform.open()
    return platform


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(24_576, 4096), (4096, 12_288), (576, 1536), (50, 7)])
def test_a_row_of_a_product_has_the_same_bits_among_any_others(
    gpu: CudaBackend, out_features: int, in_features: int, dtype: str
) -> None:
    from hetero_worker.kernels.matmul import linear

    generator = torch.Generator(gpu.device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=gpu.device).to(DTYPES[dtype])

    x, weight = randn(300, in_features), randn(out_features, in_features)
    whole = linear(x, weight, None)
    for rows in (*range(1, 71), 128, 129, 299):
        assert torch.equal(linear(x[:rows], weight, None), whole[:rows]), f"{rows} rows"
        assert torch.equal(linear(x[-rows:], weight, None), whole[-rows:]), f"the last {rows} rows"
    tolerance = 1e-2 if dtype == "bfloat16" else 2e-5
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)


@pytest.mark.parametrize("width", [2048, 576])
def test_a_token_is_routed_alike_among_any_others_and_as_on_the_host(gpu: CudaBackend, width: int) -> None:
    from hetero_worker.kernels.routing import router_logits

    hidden, weight, norm = torch.randn(65, width).bfloat16(), torch.randn(60, width).bfloat16(), torch.randn(width)
    experts = ExpertsConfig(60, 4, 8, layers=(0,), routing=Routing("sigmoid"))
    on_host, states = RouterWeights(experts, weight, norm, 1e-6), hidden.to(gpu.device)
    router = replace(on_host, weight=weight.to(gpu.device), norm=norm.to(gpu.device))
    whole = router_logits(states, router)
    assert all(torch.equal(router_logits(states[i : i + 1], router)[0], whole[i]) for i in range(65))
    for found, expected in zip(choose(whole, router), PLAIN_OPS.route(hidden, on_host), strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_rank_gives_a_request_the_same_bits_on_every_way(gpu: CudaBackend, tmp_path: Path, dtype: str) -> None:
    model = save_random_llama(tmp_path / "model")
    assert differing(asked(gpu, model, WHOLE, 0, LocalExchange(), dtype=dtype)) == []


@pytest.mark.parametrize("shares", LAYOUTS.values(), ids=list(LAYOUTS))
def test_so_does_a_group_of_a_gpu_and_two_cpu_ranks(tmp_path: Path, shares: Shares) -> None:
    model = save_random_llama(tmp_path / "model")
    assert run_ranks(body, 3, model, shares, 1, "bfloat16", False) == [[], [], []]
