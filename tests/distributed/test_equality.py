"""Greedy tokens equal Hugging Face transformers', tie-aware, for 20 real prompts on 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hetero_client import Completion, HeteroClient, SamplingParams
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.prompts import PROMPTS
from tests.support.reference import Reference

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
LAYOUTS = {1: 2, 2: 1, 3: 1}
"""Ranks → cores a rank."""
HEADS = {1: [3], 2: [2, 1], 3: [1, 1, 1]}


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return Reference.from_directory(smollm2)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda ranks: f"{ranks}-ranks")
def group(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalGroupProcess]:
    folder = tmp_path_factory.mktemp("group")
    ranks = request.param
    # A small token budget makes long prompts go through in chunks, mixed with others' decoding.
    even = [1] * ranks
    manifest = write_manifest(
        folder,
        model=smollm2,
        ranks=ranks,
        cores=LAYOUTS[ranks],
        shares={"attention": HEADS[ranks], "mlp": even, "vocabulary": even},
        engine={"maxNumBatchedTokens": 256},
    )
    with LocalGroupProcess(manifest, home=folder / "home") as running:
        yield running


def generate_all(client: HeteroClient, prompts: tuple[str, ...]) -> list[Completion]:
    """All prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: client.generate_text(prompt, sampling=GREEDY), prompts))


def test_twenty_prompts_equal_transformers(group: LocalGroupProcess, reference: Reference) -> None:
    with group.client() as client:
        tokens = [client.tokenize(prompt) for prompt in PROMPTS]
        cold = generate_all(client, PROMPTS)
        warm = generate_all(client, PROMPTS)
    lengths = sorted(map(len, tokens))
    assert lengths[0] <= 5
    assert lengths[-1] >= 800
    disagreements = {
        prompt[:40]: found
        for runs in (cold, warm)
        for prompt, prompt_ids, completion in zip(PROMPTS, tokens, runs, strict=True)
        if (found := reference.disagreements(prompt_ids, completion.token_ids))
    }
    assert disagreements == {}
    assert all(len(completion.token_ids) == 64 for completion in cold + warm)
    # The second time, prompts of at least a block came from the prefix cache.
    assert all(c.usage.cached_tokens > 0 for c, ids in zip(warm, tokens, strict=True) if len(ids) > 32)


def test_ranks_own_what_the_plan_says(group: LocalGroupProcess) -> None:
    with group.admin() as admin:
        topology = admin.topology()
    heads = [rank.kv_heads.size for rank in topology.ranks if rank.kv_heads is not None]
    assert heads == HEADS[len(topology.ranks)]
    assert topology.exchange == "shm"
