"""A group in batch-invariant mode tells a request the same numbers alone, in company and after a prefix hit.

Everything is real but the GPU, which the host plays. The served groups' cache is small and prompts are long, so that
requests are computed in chunks, together, and anew after they had to make room.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hetero_client import Completion, HeteroClient, SamplingParams
from tests.support import asked_again
from tests.support.local_group import REPOSITORY, LocalGroupProcess
from tests.support.pseudo_gpu_up import MODULE, write_mixed_manifest
from tests.support.random_model import save_random_llama
from tests.support.rank_processes import run_ranks
from tests.support.rank_shares import Shares
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE = {"batchInvariant": True, "maxNumBatchedTokens": 50, "kvCacheMemoryBytes": "750Ki", "maxNumSeqs": 8}
SHARES = {"attention": [5, 1, 2], "mlp": [2, 1, 1], "vocabulary": [1, 1, 1]}
LAYOUTS = {
    1: Shares(kv_heads=((5, 3),), mlp_columns=((192, 128),), vocab_rows=(192, 128)),
    3: Shares(kv_heads=((4, 1, 2, 1),), mlp_columns=((128, 64, 64, 64),), vocab_rows=(128, 64, 64, 64)),
}
"""With one CPU rank each."""
PROMPTS = [tuple(range(3, 3 + length)) for length in (1, 16, 60, 117)] + [tuple(range(200, 300))]


@pytest.mark.parametrize("num_gpu_ranks", LAYOUTS)
def test_ranks_as_processes_compute_the_same_bits_on_every_way(tmp_path: Path, num_gpu_ranks: int) -> None:
    """Three GPU ranks add up among themselves, too."""
    shares = LAYOUTS[num_gpu_ranks]
    model = save_random_llama(tmp_path / "model")
    world = len(shares.vocab_rows)
    results = run_ranks(asked_again.body, world, model, shares, num_gpu_ranks, "bfloat16", True)
    assert results == [[]] * world


def numbers(completion: Completion) -> tuple[Any, ...]:
    """Tokens, and the log-probabilities of all of them and of others, as they came."""
    return completion.token_ids, completion.logprobs


def ask(client: HeteroClient, index: int, **more: Any) -> Completion:
    sampling = SamplingParams(
        temperature=0.9, top_p=0.9, seed=index, max_tokens=20, ignore_eos=True, logprobs=3, **more
    )
    return client.generate_text(PROMPTS[index], sampling=sampling)


@pytest.mark.parametrize("variant", ["llama-biased", "qwen3-moe"])
def test_requests_are_told_the_same_numbers_in_any_company(tmp_path: Path, variant: str) -> None:
    model = save_tiny_model(tmp_path / "model", variant)
    manifest = write_mixed_manifest(
        tmp_path, model=model, gpus=1, cpus=2, shares=SHARES, engine=ENGINE, max_model_len=160
    )
    group = LocalGroupProcess(
        manifest, home=tmp_path / "home", module=MODULE, environment={"PYTHONPATH": str(REPOSITORY)}
    )
    everyone = range(len(PROMPTS))
    with group, group.client() as client, group.admin() as admin:
        alone = [ask(client, index) for index in everyone]
        again = [ask(client, index) for index in everyone]
        with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
            together = list(pool.map(lambda index: ask(client, index), [*everyone, *everyone]))
        kernels = [rank.kernels for rank in admin.topology().ranks]
    assert any(completion.usage.cached_tokens for completion in again)
    assert list(map(numbers, again)) == list(map(numbers, alone))
    assert list(map(numbers, together)) == 2 * list(map(numbers, alone))
    # Rows of native kernels are independent in any mode; all others have a mode of their own for it.
    parts = [kernel for of_rank in kernels for kernel in of_rank if kernel.startswith(("attention=", "fused="))]
    assert len(parts) == 2 * len(kernels)
    assert [
        part for part in parts if "-invariant" not in part and "=native" not in part and "paged-native" not in part
    ] == []
