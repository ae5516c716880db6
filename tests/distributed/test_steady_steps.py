"""Decoding on and on takes no memory from the system but for the tokens' keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_group import Shares
from tests.support.rank_processes import run_ranks
from tests.support.steady_steps import Taken, decode_steadily
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.distributed

STEPS = 300
SHARES = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(40_000,))


def test_a_steady_step_takes_no_memory_from_the_system(tmp_path: Path) -> None:
    """Its logits alone are 1.25 MiB: more than 300 pages a step, were they taken anew."""
    save_tiny("llama", tmp_path, vocab_size=40_000, max_position_embeddings=1024)
    (taken,) = run_ranks(decode_steadily, 1, tmp_path, SHARES, STEPS)
    assert isinstance(taken, Taken)
    print(f"\n{STEPS} steps: {taken}")
    assert taken.page_faults - taken.kv_bytes // 4096 < STEPS
    assert taken.resident_bytes < taken.kv_bytes + 2 * 1024**2
