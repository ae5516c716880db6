"""Experts in two grouped products are those in float64, whoever chose them, and the host never waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_api.model_parts import Activation, ExpertsConfig
from hetero_api.weight_format import FP8, INT8, WeightFormat, int4
from hetero_worker.adapters.peft_files import LowRankFactors
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.fused_ops import PLAIN_OPS
from hetero_worker.layers.linear_kernels import PackedExperts, PackedMlp
from hetero_worker.layers.triton import experts as device_experts
from hetero_worker.layers.triton.linear import DeviceKernel, TritonKernel
from tests.support.seeded import seeded
from tests.unit.kernels.test_quantized_matmul import DEVICE, randn, random_matrix

pytestmark = pytest.mark.unit

NUMBER, PER_TOKEN, HIDDEN, WIDTH = 5, 2, 72, 40
FORMATS: Final[dict[str, WeightFormat | None]] = {
    "int4": int4(), "int8": INT8, "fp8": FP8, "mxfp4": WeightFormat(4, 32, is_float=True), "floats": None
}  # fmt: skip
SHAPE: Final = ExpertsConfig(NUMBER, PER_TOKEN, WIDTH, layers=(0,))


class Experts:
    """Numbers of all experts of a layer and of one of all tokens, and what a kernel makes of some of them."""

    def __init__(
        self,
        weights: WeightFormat | None,
        activation: Activation,
        *,
        biased: bool,
        invariant: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.activation = activation
        self.dtype = dtype
        self.kernel = (TritonKernel if invariant else DeviceKernel)(DEVICE, dtype)
        self.counts = torch.zeros(NUMBER, dtype=torch.int64)
        self.numbers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.packed: list[PackedMlp] = []
        for number in range(NUMBER + 1):
            gate_up, down = (
                random_matrix(*shape, weights or int4(), seed=2 * number + i)
                for i, shape in enumerate([(2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)])
            )
            biases = [randn(2 * WIDTH, seed=number) * biased, randn(HIDDEN, seed=number + 50) * biased]
            self.numbers.append((gate_up.dequantized(), biases[0], down.dequantized(), biases[1]))
            given = [bias.to(dtype) for bias in biases] if biased else [None, None]
            pack = self._pack if weights is None else self.kernel.pack_quantized
            self.packed.append(PackedMlp(pack(gate_up), given[0], pack(down), given[1]))

    def _pack(self, matrix: QuantizedMatrix) -> Any:
        return self.kernel.pack(matrix.dequantized().to(self.dtype))

    def joined(self, held: Mapping[int, PackedMlp], *, shared: bool) -> PackedExperts:
        found = self.kernel.join_experts(
            SHAPE,
            self.activation,
            shared=self.packed[NUMBER] if shared else None,
            counts=self.counts,
            loaded=list(held.values()),
        )
        assert found is not None
        found.hold(held)
        return found

    def some(self, *numbers: int) -> dict[int, PackedMlp]:
        return {number: self.packed[number] for number in numbers}

    def exact(self, x: torch.Tensor, number: int) -> torch.Tensor:
        gate_up, gate_up_bias, down, down_bias = (part.double() for part in self.numbers[number])
        return PLAIN_OPS.gated(x.double() @ gate_up.T + gate_up_bias, self.activation) @ down.T + down_bias

    def check(
        self, joined: PackedExperts, x: torch.Tensor, chosen: torch.Tensor, held: Mapping[int, Any], *, shared: bool
    ) -> None:
        shares = torch.rand(chosen.shape, generator=seeded(9))
        expected = self.exact(x, NUMBER) if shared else torch.zeros(x.shape, dtype=torch.float64)
        for token, numbers in enumerate(chosen.tolist()):
            for place, number in enumerate(numbers):
                if number in held:
                    expected[token] += shares[token, place] * self.exact(x[token : token + 1], number)[0]
        found = joined(x, chosen, shares).double()
        bound = 1e-5 * max(1.0, float(expected.abs().max())) if len(x) else 1.0
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def choices(tokens: int, *, seed: int = 4) -> torch.Tensor:
    scores = torch.rand(tokens, NUMBER, generator=seeded(seed))
    return scores.argsort(dim=1)[:, :PER_TOKEN]


@pytest.mark.parametrize(
    ("kind", "tokens"), [*((kind, 3) for kind in FORMATS), ("int4", 0), ("int4", 1), ("int4", 33), ("floats", 33)]
)
def test_held_experts_add_up(kind: str, tokens: int) -> None:
    experts = Experts(FORMATS[kind], "silu", biased=False, invariant=False)
    held = experts.some(0, 2, 3)
    chosen = choices(tokens)
    experts.check(experts.joined(held, shared=False), randn(tokens, HIDDEN), chosen, held, shared=False)
    expected = [int((chosen == number).sum()) if number in held else 0 for number in range(NUMBER)]
    assert experts.counts.tolist() == expected


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_with_biases_and_an_expert_of_all_tokens(activation: Activation) -> None:
    experts = Experts(FORMATS["mxfp4"], activation, biased=True, invariant=True)
    held = experts.some(1, 4)
    experts.check(experts.joined(held, shared=True), randn(7, HIDDEN), choices(7), held, shared=True)


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize(("biased", "shared"), [(False, True), (True, False)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_experts_of_few_rows_add_up_row_by_row(
    activation: Activation, biased: bool, shared: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit floats are rounded as the grouped products round them, but for the order of sums."""
    experts = Experts(None, activation, biased=biased, invariant=False, dtype=torch.bfloat16)
    held = experts.some(0, 2, 3)
    x, chosen = randn(tokens, HIDDEN, dtype=torch.bfloat16), choices(tokens)
    chosen[-1, 0] = NUMBER  # padding
    shares = torch.rand(chosen.shape, generator=seeded(9))
    by_row = experts.joined(held, shared=shared)(x, chosen, shares)
    expected = [int((chosen == number).sum()) if number in held else 0 for number in range(NUMBER)]
    assert experts.counts.tolist() == expected
    monkeypatch.setattr(device_experts, "_FEW_CHOICES", 0)
    grouped = experts.joined(held, shared=shared)(x, chosen, shares)
    assert experts.counts.tolist() == [2 * count for count in expected]
    torch.testing.assert_close(by_row, grouped, rtol=2e-2, atol=2e-2 * float(grouped.abs().max()))


def test_experts_change_between_steps() -> None:
    experts = Experts(INT8, "silu", biased=False, invariant=False)
    joined = experts.joined(experts.some(0, 1), shared=False)
    for held in (experts.some(3), experts.some(0, 1, 2, 3, 4)):
        joined.hold(held)
        experts.check(joined, randn(5, HIDDEN), choices(5), held, shared=False)
    other = Experts(int4(), "silu", biased=False, invariant=False)
    with pytest.raises(ValueError, match="weights of one kind"):
        joined.hold(other.some(0))


def test_many_choices_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(int4(), "silu", biased=False, invariant=False)
    held = experts.some(0, 2)
    monkeypatch.setattr(device_experts, "CHOICES_AT_ONCE", 6)
    experts.check(experts.joined(held, shared=True), randn(8, HIDDEN), choices(8), held, shared=True)


def test_a_sum_may_come_in_two() -> None:
    experts = Experts(int4(), "silu", biased=False, invariant=False)
    held = experts.some(0, 1, 3)
    x, chosen, shares = randn(4, HIDDEN), choices(4), torch.ones(4, PER_TOKEN)
    joined = experts.joined(held, shared=True)
    early, late = joined.in_two(x, chosen, shares, late=1)
    torch.testing.assert_close(
        early + late(), joined(x, chosen, shares), rtol=1e-5, atol=1e-5 * float(early.abs().max())
    )
    assert torch.equal(early, joined(x, chosen[:, :1], shares[:, :1]))


def test_one_expert_may_be_chosen_by_all_or_by_none() -> None:
    experts = Experts(FP8, "silu", biased=False, invariant=False)
    held = experts.some(2)
    joined = experts.joined(held, shared=False)
    for number in (2, 3):
        chosen = torch.full((20, PER_TOKEN), number)
        experts.check(joined, randn(20, HIDDEN), chosen, held, shared=False)


def test_experts_of_several_kinds_are_computed_one_by_one() -> None:
    first, second = (Experts(weights, "silu", biased=False, invariant=False) for weights in (int4(), INT8))
    mixed = [first.packed[0], second.packed[1]]
    assert first.kernel.join_experts(SHAPE, "silu", shared=None, counts=first.counts, loaded=mixed) is None


class _NoAnswers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where the host asks the device for a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"the host waits for {func}")
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing() -> None:
    experts = Experts(int4(), "silu", biased=False, invariant=False)
    joined = experts.joined(experts.some(0, 2), shared=True)
    x, chosen = randn(3, HIDDEN), choices(3)
    with _NoAnswers():  # type: ignore[no-untyped-call]
        joined(x, chosen, torch.ones(chosen.shape))
        with pytest.raises(AssertionError, match="the host waits"):
            chosen[0, 0].item()


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
def test_choices_of_tokens_with_adapters_have_their_products(invariant: bool) -> None:
    """Whole experts and one that an adapter leaves as it is; padding, and an adapter that goes."""
    experts = Experts(None, "silu", biased=False, invariant=invariant)
    joined, held = experts.joined(experts.some(0, 1, 2, 4), shared=False), {}
    for adapter in (1, 3):
        held[adapter] = {
            number: tuple(
                LowRankFactors(randn(2, width, seed=at) / 8, randn(height, 2, seed=at + 1))
                for at, (height, width) in enumerate([(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)], 10 * number)
            )
            for number in (0, 4)
        }
        joined.hold_adapter(adapter, held[adapter], torch.float32, max_rank=4)
    x, adapters = randn(6, HIDDEN, seed=9), torch.tensor([0, 1, 3, 1, 0, 0])
    chosen = torch.tensor([[0, 1], [0, 4], [4, 2], [3, 1], [4, 0], [NUMBER, NUMBER]])
    shares = randn(6, PER_TOKEN, seed=3).abs()
    expected = torch.zeros(6, HIDDEN, dtype=torch.float64)
    for token, (adapter, choices) in enumerate(zip(adapters.tolist(), chosen.tolist(), strict=True)):
        for choice, number in enumerate(choices):
            if number in (0, 1, 2, 4):
                factors = held.get(adapter, {}).get(number)
                expected[token] += shares[token, choice].double() * adapted(experts, x[token], number, factors)
    torch.testing.assert_close(joined(x, chosen, shares, adapters).double(), expected, rtol=1e-4, atol=1e-4)
    joined.hold_adapter(3, {}, torch.float32, max_rank=4)
    without = joined(x, chosen, shares, torch.where(adapters == 3, 0, adapters))
    assert torch.equal(joined(x, chosen, shares, adapters), without)


def adapted(experts: Experts, x: torch.Tensor, number: int, factors: tuple[LowRankFactors, ...] | None) -> torch.Tensor:
    """What an expert gives with an adapter, in float64."""
    gate_up, _, down, _ = (part.double() for part in experts.numbers[number])
    gates = gate_up @ x.double()
    if factors is None:
        return down @ PLAIN_OPS.gated(gates[None], experts.activation)[0]
    gate, up, last = (tuple(each.double() for each in pair) for pair in factors)
    gates += torch.cat([second @ (first @ x.double()) for first, second in (gate, up)])
    inner = PLAIN_OPS.gated(gates[None], experts.activation)[0]
    return down @ inner + last[1] @ (last[0] @ inner)
