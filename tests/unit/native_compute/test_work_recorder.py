"""Work of a probe that is recorded: the same numbers again, and what torch does is not lost."""

from __future__ import annotations

import pytest
import torch

from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.native.compute_library import load_compute
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.native.team import NativeTeam
from hetero_worker.probe.layers import WorkRecorder

pytestmark = pytest.mark.unit


@pytest.fixture
def op_queue() -> OpQueue:
    loaded = load_compute()
    assert loaded.library is not None, loaded.reason
    return OpQueue(NativeTeam(loaded.library, 2))


def test_recorded_work_computes_anew_from_what_is_there_then(op_queue: OpQueue) -> None:
    weight = torch.randn(48, 32)
    packed, x = NativeLinear(op_queue).pack(weight), torch.randn(2, 32)
    again = WorkRecorder(op_queue)(lambda: packed(x, None))
    x.normal_()
    torch.testing.assert_close(again(), x @ weight.T)


def test_two_recordings_share_memory_and_do_not_disturb_each_other(op_queue: OpQueue) -> None:
    record, x = WorkRecorder(op_queue), torch.randn(1, 32)
    weights = [torch.randn(32, 32) for _ in range(2)]
    packed = [NativeLinear(op_queue).pack(weight) for weight in weights]
    first, second = record(lambda: packed[0](x, None)), record(lambda: packed[1](x, None))
    for _ in range(2):
        torch.testing.assert_close(first(), x @ weights[0].T)
        torch.testing.assert_close(second(), x @ weights[1].T)


def test_work_that_torch_has_a_part_in_stays_as_it_is(op_queue: OpQueue) -> None:
    packed, x = NativeLinear(op_queue).pack(torch.randn(48, 32)), torch.randn(2, 32)

    def work() -> torch.Tensor:
        return torch.sigmoid(packed(x, None))

    assert WorkRecorder(op_queue)(work) is work


def test_the_residual_sum_that_a_step_fuses_is_left_out(op_queue: OpQueue) -> None:
    packed, x = NativeLinear(op_queue).pack(torch.randn(32, 32)), torch.randn(1, 32)
    total = torch.zeros(1, 32)

    def work() -> None:
        total.add_(packed(x, None))

    again = WorkRecorder(op_queue)(work)
    assert again is not work
    before = total.clone()
    again()
    torch.testing.assert_close(total, before)
