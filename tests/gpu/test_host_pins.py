"""Memory that ranks share, pinned for a real device: it copies from and to it without holding the thread up."""

from __future__ import annotations

import logging

import pytest
import torch

from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.cuda.streams import CudaStreams
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.routes import Link, Routes
from hetero_worker.distributed.shm_segment import SHM_FOLDER, SegmentLayout, ShmSegment, unlink
from hetero_worker.distributed.staging import StreamStaging, direct_links
from tests.support.gpu_needed import skip_without_gpu
from tests.support.shm_threads import PAGE, exchanges

skip_without_gpu()

pytestmark = pytest.mark.gpu

THERE, BACK = Link(0, 0, (1,)), Link(1, 1, (0,))


@pytest.fixture(scope="module")
def device() -> torch.device:
    platform = CudaBackend(0, pool="test")
    platform.open()
    return platform.device


def test_a_segment_is_pinned_until_its_rank_leaves(device: torch.device) -> None:
    segment = ShmSegment.create("hetero-test-pins", SegmentLayout(1, PAGE))
    unlink("hetero-test-pins")
    memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
    assert not memory.is_pinned()
    assert segment.pin(CudaStreams(device)) == ""
    assert memory.is_pinned()
    segment.leave()
    assert not memory.is_pinned()


def test_memory_that_cannot_be_pinned_is_told_and_the_device_goes_on(device: torch.device) -> None:
    assert CudaStreams(device).pin(PAGE, PAGE)
    assert torch.ones(5, device=device).sum().item() == 5


def test_tensors_cross_shared_memory_as_they_went(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), exchanges(SHM_FOLDER, 2, routes=Routes(links=(THERE, BACK))) as ranks:
        staging = StreamStaging(CudaStreams(device))
        leader = HierarchicalExchange(
            ranks[0], num_gpu_ranks=1, groups={}, links={}, staging=staging, host_links=direct_links(ranks[0], staging)
        )
        for size in (1, 100, PAGE // 2, PAGE, 3 * PAGE):
            sent, out = torch.randn(size, device=device).bfloat16(), torch.empty(size, device=device).bfloat16()
            leader.start_send(sent, THERE).finish()
            came = ranks[1].receive(torch.empty(size, dtype=torch.bfloat16), THERE).wait()
            assert torch.equal(came, sent.cpu())
            ranks[1].send(2 * came, BACK)
            pending = leader.receive(out, BACK)
            assert torch.equal(pending.wait(), 2 * sent)
    assert "pinned buffers" not in caplog.text
