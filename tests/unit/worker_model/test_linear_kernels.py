"""Every kernel multiplies as F.linear does, and the choice among them follows the measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch.nn import functional as F

from hetero_worker.layers.kernel_choice import ROW_COUNTS, choose_kernel, least_times
from hetero_worker.layers.linear_kernels import PackedWeight, PlainKernel, available_kernels, works

pytestmark = pytest.mark.unit

KERNELS = [(dtype, kernel) for dtype in (torch.float32, torch.bfloat16) for kernel in available_kernels(dtype)]


@pytest.mark.parametrize(("dtype", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (70, 33), (64, 576), (7, 50)])
@pytest.mark.parametrize("rows", [0, 1, 5, 8, 33])
def test_kernel_equals_plain_linear(
    dtype: torch.dtype, kernel: PlainKernel, out_features: int, in_features: int, rows: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    packed = kernel.pack(weight.clone())
    with torch.inference_mode():
        for given in (None, bias):
            expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
            result = packed(x, given)
            assert result.shape == (rows, out_features)
            assert result.dtype == dtype
            tolerance = 1e-4 if dtype == torch.float32 else 0.05
            assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)


def test_a_packed_weight_does_not_need_the_unpacked_one() -> None:
    for kernel in available_kernels(torch.float32):
        weight = torch.ones(4, 6)
        packed = kernel.pack(weight)
        if kernel.copies_weight:
            weight.zero_()
        assert torch.equal(packed(torch.ones(2, 6), None), torch.full((2, 4), 6.0))


def test_the_plain_kernel_is_always_available_and_first() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert available_kernels(dtype)[0].name == "torch"


class _Named:
    """A kernel that stands for its place in a measurement."""

    copies_weight = False

    def __init__(self, name: str) -> None:
        self.name = name

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return PlainKernel().pack(weight)


class _Missing(_Named):
    def pack(self, weight: torch.Tensor) -> PackedWeight:
        raise AttributeError("'_OpNamespace' object has no attribute '_mkl_linear'")


class _Wrong(_Named):
    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return PlainKernel().pack(weight + 1)


def test_a_kernel_that_the_build_lacks_or_that_is_wrong_is_left_out() -> None:
    assert works(_Named("good"), torch.float32)
    assert not works(_Missing("missing"), torch.float32)
    assert not works(_Wrong("wrong"), torch.float32)


def _scripted(times: Mapping[str, Sequence[float]]) -> Callable[[Sequence[object]], list[float]]:
    table = [time for row in times.values() for time in row]

    def measure(trials: Sequence[object]) -> list[float]:
        assert len(trials) == len(table)
        return table

    return measure


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"a": (4, 4, 4, 4), "b": (1, 1, 1, 1)}, "b"),
        ({"a": (1, 1, 1, 1), "b": (4, 4, 4, 4)}, "a"),
        ({"a": (1, 9, 9, 9), "b": (2, 3, 3, 3)}, "b"),
        ({"a": (1, 1, 1, 1), "b": (0.99, 0.99, 0.99, 0.99)}, "a"),
        ({"a": (3, 3, 3, 3), "b": (2, 2, 2, 2), "c": (1.99, 1.99, 1.99, 1.99)}, "b"),
    ],
)
def test_choice_follows_the_geometric_mean_and_ties_go_to_the_first(
    times: dict[str, tuple[float, ...]], expected: str
) -> None:
    assert len(ROW_COUNTS) == 4
    kernels = [_Named(name) for name in times]
    chosen = choose_kernel(kernels, [(8, 4)], dtype=torch.float32, measure=_scripted(times))
    assert chosen.name == expected


def test_a_rank_without_linear_layers_times_nothing() -> None:
    kernels = [_Named("a"), _Named("b")]
    assert choose_kernel(kernels, [], dtype=torch.float32, measure=_scripted({})).name == "a"


def test_huge_shapes_are_cropped_before_they_are_timed() -> None:
    kernels = [_Named("a"), _Named("b")]
    chosen = choose_kernel(
        kernels,
        [(10**9, 8192)],
        dtype=torch.float32,
        measure=_scripted({"a": (2, 2, 2, 2), "b": (1, 1, 1, 1)}),
    )
    assert chosen.name == "b"


def test_measuring_leaves_the_thread_count_alone() -> None:
    before = torch.get_num_threads()
    choose_kernel([_Named("a"), _Named("b")], [(8, 4)], dtype=torch.float32)
    assert torch.get_num_threads() == before


def test_least_times_tells_a_slow_trial_from_a_fast_one() -> None:
    x = torch.randn(300, 300)

    def multiply() -> None:
        for _ in range(5):
            x @ x

    fast, slow = least_times([lambda: None, multiply])
    assert 0 <= fast < slow
