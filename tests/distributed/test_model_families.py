"""Every family of models in real groups of CPU ranks, uneven within layers and in stages, through all that happens.

One group of a model sees it all: more sequences than the cache holds, a rank that is killed while a stream runs, sleep
that drops the weights, and another cache. All tokens are transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetero_api.model_config import ModelConfig
from hetero_api.rank_memory import ModelMemory, StepLimits
from hetero_client import HeteroClient, SamplingParams
from hetero_placement.shard_plans import shard_of_layers
from tests.distributed.test_hetero_group import MIXED_VARIANTS, check_stream_over_a_loss
from tests.support.local_group import LocalGroupProcess, shared_segments, write_manifest
from tests.support.reference import Reference
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
LENGTHS = (1, 16, 17, 60, 90, 100, 100, 110)
MAX_MODEL_LEN = 192
BLOCK_SIZE = 16
NUM_BLOCKS = 15
"""Of a rank that holds all heads of all layers. The sequences fill 62, and one may take 12."""
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "uneven": {"shares": {"attention": [5, 3], "mlp": [1, 2], "vocabulary": [2, 1]}},
    "stages": {"mode": "Layer"},
}
REFUSED = {("gemma4-readers", "stages")}
"""Layers that read other layers' keys and values are on one rank with these: all layers of this variant."""
CASES = [(variant, layout) for variant in MIXED_VARIANTS for layout in LAYOUTS if (variant, layout) not in REFUSED]


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_a_group_of_a_family_goes_on_through_everything(tmp_path: Path, variant: str, layout: str) -> None:
    model = save_tiny_model(tmp_path / "model", variant, **MIXED_VARIANTS[variant])
    reference = Reference.from_directory(model)
    manifest = write_manifest(
        tmp_path, model=model, max_model_len=MAX_MODEL_LEN, engine=_small_cache(model), **LAYOUTS[layout]
    )
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client:
        _check_many(client, reference)
        check_stream_over_a_loss(group, client, reference, "cpu-1", max_tokens=MAX_TOKENS)
        with group.admin() as admin:
            admin.sleep(2)
            admin.wake_up()
            _check_many(client, reference)
            assert admin.reset_cache(block_size=12).block_size == 12
            _check_many(client, reference)
        assert _preemptions(group) > 0
    assert shared_segments() == set()


def _small_cache(model: Path) -> dict[str, Any]:
    config = ModelConfig.from_directory(model)
    memory = ModelMemory(config, StepLimits(50, len(LENGTHS), MAX_MODEL_LEN), element_bytes=4)
    token_bytes = memory.kv_cost(shard_of_layers(config, 0, config.num_layers)).cache_bytes
    return {
        "maxNumBatchedTokens": 50,
        "maxNumSeqs": len(LENGTHS),
        "blockSize": BLOCK_SIZE,
        "kvCacheMemoryBytes": str(NUM_BLOCKS * BLOCK_SIZE * token_bytes),
    }


def _check_many(client: HeteroClient, reference: Reference) -> None:
    """All at once, and no two begin alike."""
    prompts = [tuple((seed * 37 + i * i * 11 + i) % 256 for i in range(n)) for seed, n in enumerate(LENGTHS)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        completions = list(pool.map(lambda prompt: client.generate_text(prompt, sampling=GREEDY), prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == MAX_TOKENS
        assert reference.disagreements(prompt, completion.token_ids) == []


def _preemptions(group: LocalGroupProcess) -> float:
    text = httpx.get(f"http://{group.record.http}/metrics", trust_env=False).text
    (family,) = (each for each in text_string_to_metric_families(text) if each.name == "vllm:num_preemptions")
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
