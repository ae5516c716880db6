"""Whole layers on each rank: real processes, shared memory, the same tokens as transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hetero_client import SamplingParams
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.reference import Reference
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPT = tuple(range(3, 253))
LENGTHS = (1, 17, 250, 250)


@pytest.mark.parametrize(
    ("kind", "ranks", "shares", "changes"),
    [
        ("qwen3", 2, None, {"num_hidden_layers": 4}),
        ("llama", 3, {"mlp": [1, 3, 1]}, {"num_hidden_layers": 5}),
        ("qwen3", 2, None, {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    ],
    ids=["even", "uneven", "tied"],
)
def test_stages_of_whole_layers_equal_transformers(
    tmp_path: Path, kind: str, ranks: int, shares: dict[str, list[int]] | None, changes: dict[str, Any]
) -> None:
    """Long prompts go in micro-batches (150 rows), and mix with others' decoding."""
    model = save_tiny_model(tmp_path / "model", kind, **changes)
    manifest = write_manifest(
        tmp_path,
        model=model,
        ranks=ranks,
        mode="Layer",
        shares=shares,
        max_model_len=None,
        engine={"maxNumBatchedTokens": 150},
    )
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client:
        with ThreadPoolExecutor(len(LENGTHS)) as pool:
            runs = list(pool.map(lambda n: client.generate_text(PROMPT[:n], sampling=GREEDY), LENGTHS))
        again = client.generate_text(PROMPT, sampling=GREEDY)
        with group.admin() as admin:
            topology = admin.topology()
    assert all(rank.kv_bytes > 0 for rank in topology.ranks)
    assert [rank.embedding_rows.size > 0 for rank in topology.ranks if rank.embedding_rows is not None] == [
        rank.rank == 0 for rank in topology.ranks
    ]
    assert [rank.head_rows.size > 0 for rank in topology.ranks if rank.head_rows is not None] == [
        rank.rank == ranks - 1 for rank in topology.ranks
    ]
    reference = Reference.from_directory(model)
    for length, run in zip(LENGTHS, runs, strict=True):
        assert reference.disagreements(PROMPT[:length], run.token_ids) == []
    assert again.token_ids == runs[-1].token_ids
    assert again.usage.cached_tokens > 0
