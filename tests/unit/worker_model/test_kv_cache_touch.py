"""The beginning of a host's KV cache is there before it is written to."""

from __future__ import annotations

import resource
import threading

import pytest
import torch

from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.backends import torch_reference
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.memory.huge_pages import HUGE_PAGE_BYTES, populate_in_background

pytestmark = pytest.mark.unit

BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 1024, 16, 2, 128
HALF = BLOCKS * BLOCK_SIZE * HEADS * HEAD_DIM * 4 // 2
"""Bytes; 8 MiB."""


def faults_of_writing(part: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    part.view(-1)[::1024].copy_(torch.ones(1))
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_was_touched_costs_no_page_faults_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LayerCache.allocate(
        num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    faults_of_writing(torch.zeros(1024))  # the code's own
    monkeypatch.setattr(torch_reference, "TOUCHED_BYTES", 2 * HALF)
    TorchReference().touch_cache([cache.keys, cache.values])
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join(30)
    rows = BLOCKS * BLOCK_SIZE // 2
    for tensor in (cache.keys, cache.values):
        touched = faults_of_writing(tensor[:rows])
        assert faults_of_writing(tensor[rows:]) >= touched + 3  # pages of 2 MiB, where the kernel gives them


def test_touching_more_than_there_is_touches_all_and_leaves_zeros() -> None:
    cache = LayerCache.allocate(
        num_blocks=4, block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    TorchReference().touch_cache([cache.keys, cache.values])
    assert not cache.keys.any()
    assert not cache.values.any()


def test_what_is_populated_keeps_its_content() -> None:
    tensor = torch.ones(5 * HUGE_PAGE_BYTES // 4)
    populate_in_background([tensor], HUGE_PAGE_BYTES, 9 * HUGE_PAGE_BYTES).join(30)
    assert (tensor == 1).all()


def test_populating_ends_where_a_tensor_is_gone() -> None:
    cache = LayerCache.allocate(
        num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    gone = torch.zeros(4)
    thread = populate_in_background([gone, cache.keys], 0, 1 << 62)
    del gone
    thread.join(30)
    assert not thread.is_alive()
