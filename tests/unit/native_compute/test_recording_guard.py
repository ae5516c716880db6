"""What torch does is seen, and views are free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hetero_worker.runners.recorded.guard import RecordingGuard

pytestmark = pytest.mark.unit

FREE: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda x: x.view(2, 12),
    lambda x: torch.split(x.reshape(24).view(2, 12), [4, 8], 1),
    lambda x: x[1:3, :2].transpose(0, 1).unsqueeze(0).expand(3, 2, 2),
    lambda x: x.contiguous(),
    lambda x: x.to(torch.float32),
    lambda x: x.numpy(),
    lambda x: x.chunk(2, dim=1),
    lambda x: x.t().t().contiguous(),
)
WORK: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda _: torch.empty(3),
    torch.empty_like,
    lambda x: x.new_empty(2),
    lambda x: x.add_(1),
    lambda x: x.zero_(),
    lambda _: torch.zeros(3),
    lambda x: x.double(),
    lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    lambda x: x.transpose(0, 1).contiguous(),
    lambda x: x.transpose(0, 1).reshape(-1),
    lambda x: x.index_select(0, torch.tensor([0])),
    lambda x: x.clone(),
    lambda x: x[torch.tensor([1])],
    lambda x: x.sum(),
    lambda x: torch.cat([x, x]),
    lambda x: x.copy_(torch.ones(4, 6)),
)


@pytest.mark.parametrize("inference", [True, False])
def test_views_are_free(inference: bool) -> None:
    for work in FREE:
        x = torch.randn(4, 6)
        with torch.inference_mode(inference), RecordingGuard() as guard:
            work(x)
        assert not guard.seen


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("number", range(len(WORK)))
def test_whatever_else_is_seen(number: int, inference: bool) -> None:
    x = torch.randn(4, 6)
    with torch.inference_mode(inference), RecordingGuard() as guard:
        WORK[number](x)
    assert guard.seen
