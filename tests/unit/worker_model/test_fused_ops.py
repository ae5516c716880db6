"""Which fused steps a rank gets, and a residual stream whose last addition is left for its next norm."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.kernels import availability
from hetero_worker.layers.fused_ops import PLAIN_OPS
from hetero_worker.layers.norm import ResidualStream, RmsNorm
from hetero_worker.probe.synthetic import SyntheticWeights

pytestmark = pytest.mark.unit

WIDTH = 12


class RecordedNorm(RmsNorm):
    """A norm, and how it was asked."""

    def __init__(self) -> None:
        super().__init__("norm", width=WIDTH, eps=1e-6, offset=1.0)
        self.load(SyntheticWeights(), dtype=torch.float32)
        self.asked: list[str] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append("norm")
        return super().__call__(x)

    def after_add(self, residual: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        self.asked.append("add and norm")
        return super().after_add(residual, delta)


@pytest.fixture
def norm() -> RecordedNorm:
    return RecordedNorm()


def randn(seed: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_what_was_added_last_is_added_by_the_next_norm(norm: RecordedNorm) -> None:
    hidden, delta = randn(0), randn(1)
    expected = hidden + delta
    stream = ResidualStream(hidden)
    stream.add(delta)
    assert torch.equal(hidden, randn(0)), "it waits"
    assert torch.equal(stream.normed(norm), PLAIN_OPS.rms_norm(expected, norm.weight, norm.eps))
    assert torch.equal(hidden, expected)
    assert torch.equal(stream.normed(norm), PLAIN_OPS.rms_norm(expected, norm.weight, norm.eps))
    assert norm.asked == ["add and norm", "norm"]


def test_who_reads_the_stream_gets_all_that_was_added(norm: RecordedNorm) -> None:
    stream = ResidualStream(randn(0))
    for seed in (1, 2):
        stream.add(randn(seed))
    for _ in range(2):
        assert torch.equal(stream.settle(), randn(0).add_(randn(1)).add_(randn(2)))
    stream.normed(norm)
    assert norm.asked == ["norm"]


def test_the_stream_is_added_to_in_place() -> None:
    hidden = randn(0)
    stream = ResidualStream(hidden)
    stream.add(randn(1))
    assert stream.settle() is hidden


def test_host_cores_compute_by_torchs_operators_and_import_no_kernel() -> None:
    assert TorchReference().fused_ops(batch_invariant=False).name == "torch"
    assert TorchReference("no compiler").fused_ops(batch_invariant=False).name == "torch (no compiler)"


def trial_that(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Kernels that cannot run, in the place of those that need Triton."""

    def run_one(device: torch.device) -> None:
        raise error

    module = ModuleType("hetero_worker.kernels.trial")
    vars(module)["run_one"] = run_one
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(availability, "find_spec", lambda name: object())


class AssemblerError(Exception):
    """As Triton's own errors, derived from nothing more special."""


@pytest.mark.parametrize("kind", [RuntimeError, OSError, AssemblerError])
def test_a_device_where_triton_cannot_compile_says_so(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial_that(monkeypatch, kind("no C compiler"))
    with caplog.at_level(logging.WARNING):
        assert (
            CudaBackend(0, pool="p").fused_ops(batch_invariant=False).name
            == f"torch (triton does not work here: {kind.__name__}: no C compiler)"
        )
    assert "no C compiler" in caplog.text


def test_a_device_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    assert CudaBackend(0, pool="p").fused_ops(batch_invariant=False).name == "torch (triton is not installed)"
