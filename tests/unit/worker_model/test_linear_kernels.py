"""Every kernel multiplies as F.linear does, and the choice among them follows the measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch.nn import functional as F

from hetero_api.weight_format import INT8, StoredWeights, WeightFormat, int4
from hetero_worker.layers.kernel_choice import ROW_COUNTS, choose_kernel, least_times
from hetero_worker.layers.linear_kernels import PackedWeight, PlainKernel, TeamKernel, available_kernels, works
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.memory.quantized_matrix import QuantizedMatrix
from tests.support.native_compute import issuer_of

pytestmark = pytest.mark.unit

KERNELS = [
    (dtype, kernel) for dtype in (torch.float32, torch.bfloat16) for kernel in available_kernels(dtype, issuer_of())
]


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


def test_the_native_kernel_comes_first_where_there_are_threads_for_it() -> None:
    """On a tie it is the one that is kept: weights stay narrow."""
    for dtype in (torch.float32, torch.bfloat16):
        native, *others = available_kernels(dtype, issuer_of())
        assert native.name.startswith("native (")
        assert [kernel.name for kernel in others] == [kernel.name for kernel in available_kernels(dtype)]


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


class _Narrow(_Named):
    """Takes one format, and remembers what it was handed."""

    def __init__(self, name: str, weights: WeightFormat, stored: torch.dtype = torch.float32) -> None:
        super().__init__(name)
        self._taken = weights
        self._stored = stored
        self.handed: set[object] = set()

    def storage(self, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return stored if stored == self._stored else dtype

    def takes(self, weights: WeightFormat) -> bool:
        return weights == self._taken

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        self.handed.add(weight.dtype)
        return super().pack(weight.float())

    def pack_quantized(self, matrix: QuantizedMatrix) -> PackedWeight:
        self.handed.add(matrix.format)
        return super().pack(matrix.dequantized())


def test_quantised_weights_are_not_widened_if_a_kernel_takes_them() -> None:
    """However fast the others are."""
    kernels = [_Named("a"), _Narrow("b", INT8), _Narrow("c", INT8), _Narrow("d", int4())]
    times = {"b": (2, 2, 2, 2), "c": (1, 1, 1, 1)}
    stored = StoredWeights(layers=INT8)
    chosen = choose_kernel(kernels, [(8, 4)], dtype=torch.float32, stored=stored, measure=_scripted(times))
    assert chosen.name == "c"
    only = choose_kernel(kernels, [(8, 4)], dtype=torch.float32, stored=StoredWeights(layers=int4(32)))
    assert only.name == "d"
    widening = {"a": (1, 1, 1, 1), "b": (2, 2, 2, 2), "c": (2, 2, 2, 2), "d": (2, 2, 2, 2)}
    other = StoredWeights(layers=int4(64))
    assert choose_kernel(kernels, [(8, 4)], dtype=torch.float32, stored=other, measure=_scripted(widening)).name == "a"


def test_candidates_are_timed_with_weights_as_they_keep_them() -> None:
    keeps_bfloat16, widens, whole = (_Narrow("a", INT8, torch.bfloat16), _Narrow("b", INT8), _Narrow("c", INT8))
    choose_kernel([keeps_bfloat16, widens], [(8, 4)], dtype=torch.float32, stored=StoredWeights(floats="bfloat16"))
    assert keeps_bfloat16.handed == {torch.bfloat16}
    assert widens.handed == {torch.float32}
    choose_kernel([whole, widens], [(8, 4)], dtype=torch.float32, stored=StoredWeights(layers=INT8))
    assert whole.handed == {INT8}


class _Team(_Named):
    """Must not be timed itself."""

    def __init__(self, alone: _Named) -> None:
        super().__init__("team")
        self._alone = alone

    def single_threaded(self) -> _Named:
        return self._alone

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        raise AssertionError(f"a weight of {tuple(weight.shape)} was packed for a team")


def test_a_kernel_with_threads_is_timed_by_one() -> None:
    alone = _Narrow("alone", INT8)
    team = _Team(alone)
    assert isinstance(team, TeamKernel)
    times = {"team": (1, 1, 1, 1), "a": (2, 2, 2, 2)}
    assert choose_kernel([team, _Named("a")], [(8, 4)], dtype=torch.float32, measure=_scripted(times)) is team
    assert alone.handed == {torch.float32}


def test_the_native_kernel_alone_gives_the_same_bits() -> None:
    native = NativeLinear(issuer_of(3))
    assert isinstance(native, TeamKernel)
    x, weight = torch.randn(3, 40), torch.randn(50, 40)
    assert torch.equal(native.single_threaded().pack(weight)(x, None), native.pack(weight)(x, None))


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
