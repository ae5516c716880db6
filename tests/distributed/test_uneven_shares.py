"""Four ranks of shares 5:2:1:0 on tiny random models of other families, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_client import SamplingParams
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.reference import Reference
from tests.support.tiny_models import LLAMA3_ROPE, save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SHARES = {"attention": [5, 2, 1, 0], "mlp": [1, 0, 2, 2], "vocabulary": [0, 3, 1, 1]}
PROMPT = tuple(range(3, 120))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
        ("mixtral-window", {}),
        ("qwen3-moe-some-dense", {}),
        ("gemma2", {}),
        ("gemma3", {}),
    ],
    ids=["qwen3", "qwen2", "llama3", "mixtral", "qwen3-moe", "gemma2", "gemma3"],
)
def test_four_uneven_ranks_equal_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = save_tiny_model(tmp_path / "model", kind, **changes)
    manifest = write_manifest(
        tmp_path, model=model, ranks=4, shares=SHARES, max_model_len=None, engine={"maxNumBatchedTokens": 50}
    )
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client:
        runs = [client.generate_text(PROMPT[:length], sampling=GREEDY) for length in (1, 16, 17, 117, 117)]
        with group.admin() as admin:
            ranks = admin.topology().ranks
    assert [rank.kv_heads.size for rank in ranks if rank.kv_heads is not None] == [5, 2, 1, 0]
    assert [rank.kv_bytes > 0 for rank in ranks] == [True, True, True, False]
    reference = Reference.from_directory(model)
    for length, run in zip((1, 16, 17, 117, 117), runs, strict=True):
        assert reference.disagreements(PROMPT[:length], run.token_ids) == []
    assert runs[-1].usage.cached_tokens == 112
    assert runs[-1].token_ids == runs[-2].token_ids
