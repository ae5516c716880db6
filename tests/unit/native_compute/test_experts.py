"""A layer's experts in one native operation compute what each does by itself, and give a row bits of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from hetero_api.model_parts import Activation, ExpertsConfig
from hetero_api.weight_format import WeightFormat
from hetero_worker.adapters.peft_files import LowRankFactors
from hetero_worker.layers.linear import JoinedWeights
from hetero_worker.layers.linear_kernels import ExpertFactors, PackedExperts, PackedMlp, PackedWeight
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.op_queue import Arena, OpQueue
from tests.support.native_compute import TEAMS, op_queue_of, randn
from tests.support.whole_number_linear import FORMATS, random_matrix

pytestmark = pytest.mark.unit

NUMBER, PER_TOKEN = 7, 3
HIDDEN, WIDTH, SHARED = 72, 40, 56
Stored = WeightFormat | torch.dtype
EVERY: tuple[Stored, ...] = (torch.float32, torch.bfloat16, torch.float16, *FORMATS)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")


class Layer:
    """Experts on a team; `gate_up` and `down` are how they are stored."""

    def __init__(
        self,
        *,
        team: int = 2,
        gate_up: Sequence[Stored] = (torch.float32,),
        down: Stored = torch.float32,
        dtype: torch.dtype = torch.float32,
        activation: Activation = "silu",
        biased: bool = False,
        shared: int = 0,
        hidden: int = HIDDEN,
        width: int = WIDTH,
    ) -> None:
        """`gate_up`: one format, or two of separate parts."""
        self.op_queue: OpQueue = op_queue_of(team)
        self.kernel, self.ops = NativeLinear(self.op_queue, dtype), NativeOps(self.op_queue)
        self.activation, self.dtype, self.hidden = activation, dtype, hidden
        self._stored, self._biased = (gate_up, down), biased
        self.mlps = {number: self.mlp(width, seed=10 * number) for number in range(NUMBER)}
        self.shared = self.mlp(shared, seed=999) if shared else None
        self.counts = torch.zeros(NUMBER, dtype=torch.int64)
        shape = ExpertsConfig(NUMBER, PER_TOKEN, width, layers=(0,))
        mlps = list(self.mlps.values())
        experts = self.kernel.join_experts(shape, activation, shared=self.shared, counts=self.counts, loaded=mlps)
        assert experts is not None
        self.experts: PackedExperts = experts
        self.experts.hold(self.mlps)

    def mlp(self, width: int, *, seed: int) -> PackedMlp:
        """A random one."""
        (formats, down), hidden = self._stored, self.hidden
        height = 2 * width // len(formats)
        parts = [self.packed(stored, height, hidden, seed=seed + i) for i, stored in enumerate(formats)]
        gate_up = parts[0] if len(parts) == 1 else JoinedWeights(parts, [height] * len(parts))
        biases = (randn(2 * width, seed=seed + 5), randn(hidden, seed=seed + 6)) if self._biased else (None, None)
        first, second = (None if bias is None else bias.to(self.dtype) for bias in biases)
        return PackedMlp(gate_up, first, self.packed(down, hidden, width, seed=seed + 4), second)

    def packed(self, stored: Stored, outputs: int, inputs: int, *, seed: int) -> PackedWeight:
        """A random weight in a format."""
        if isinstance(stored, torch.dtype):
            return self.kernel.pack(randn(outputs, inputs, seed=seed, dtype=stored) / 8)
        return self.kernel.pack_quantized(random_matrix(stored, outputs, inputs, seed))

    def one(self, mlp: PackedMlp, rows: torch.Tensor) -> torch.Tensor:
        """What one MLP computes by itself; its sums are not rounded."""
        gated = self.ops.gated(mlp.gate_up(rows, mlp.gate_up_bias), self.activation)
        sums: torch.Tensor = mlp.down.logits(gated).double()
        return sums if mlp.down_bias is None else sums + mlp.down_bias.double()

    def expected(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, held: Mapping[int, PackedMlp] | None = None
    ) -> torch.Tensor:
        """One expert after the other, in float64."""
        total = torch.zeros(x.shape, dtype=torch.float64) if self.shared is None else self.one(self.shared, x)
        for number, mlp in (self.mlps if held is None else held).items():
            factor = (shares.double() * (chosen == number)).sum(1, keepdim=True)
            total = total + factor * self.one(mlp, x)
        return total


def routed(rows: int, *, seed: int = 0, among: int = NUMBER) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices of the first experts, and shares."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, among, generator=generator).argsort(1)[:, :PER_TOKEN].contiguous()
    return chosen, torch.rand(rows, PER_TOKEN, generator=generator)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2**-8 if actual.dtype == torch.bfloat16 else 3e-6
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance / 4 * size)


@pytest.mark.parametrize("stored", EVERY, ids=str)
@pytest.mark.usefixtures("tile_isa")
def test_they_compute_what_each_does_by_itself(stored: Stored) -> None:
    for number, rows in enumerate((1, 2, 9, 70)):
        layer = Layer(team=TEAMS[number % 3], gate_up=[stored], down=stored, shared=SHARED if number % 2 else 0)
        x, (chosen, shares) = randn(rows, HIDDEN), routed(rows)
        assert_close(layer.experts(x, chosen, shares), layer.expected(x, chosen, shares))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("tile_isa")
def test_activations_biases_and_narrow_rows(activation: Activation, dtype: torch.dtype) -> None:
    """The widest weights have several blocks of inputs, whose sums are kept."""
    for width, hidden in ((WIDTH, HIDDEN), (300, 270), (33, 35)):
        layer = Layer(activation=activation, dtype=dtype, biased=True, shared=SHARED, width=width, hidden=hidden)
        x, (chosen, shares) = randn(11, hidden, dtype=dtype), routed(11)
        assert_close(layer.experts(x, chosen, shares), layer.expected(x, chosen, shares))


@pytest.mark.parametrize("stored", [torch.bfloat16, WeightFormat(8, 32), WeightFormat(4, 32)], ids=str)
@pytest.mark.usefixtures("tile_isa")
def test_a_rows_bits_are_its_own(stored: Stored) -> None:
    """Whatever the number of rows, its place among them and the number of threads."""
    x, (chosen, shares) = randn(70, HIDDEN), routed(70)
    alone = Layer(team=1, gate_up=[stored], down=stored, shared=SHARED).experts
    whole = torch.cat([alone(x[i : i + 1], chosen[i : i + 1], shares[i : i + 1]) for i in range(70)])
    for team in TEAMS:
        experts = Layer(team=team, gate_up=[stored], down=stored, shared=SHARED).experts
        for rows in (*range(1, 70, 4), 70):
            assert torch.equal(experts(x[-rows:], chosen[-rows:], shares[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("held", [(0, 1, 2, 3, 4, 5, 6), (5,), (1, 2, 6), ()], ids=str)
@pytest.mark.parametrize("shared", [0, SHARED])
def test_experts_that_are_elsewhere_add_nothing(held: tuple[int, ...], shared: int) -> None:
    layer = Layer(shared=shared)
    own = {number: layer.mlps[number] for number in held}
    layer.experts.hold(own)
    x, (chosen, shares) = randn(9, HIDDEN), routed(9)
    assert_close(layer.experts(x, chosen, shares), layer.expected(x, chosen, shares, own))
    counts = torch.bincount(chosen.flatten(), minlength=NUMBER)
    assert layer.counts.tolist() == [int(counts[i]) if i in held else 0 for i in range(NUMBER)]


def test_experts_without_rows_and_choices_that_repeat() -> None:
    layer, x = Layer(), randn(40, HIDDEN)
    chosen, shares = routed(40, among=PER_TOKEN)
    assert_close(layer.experts(x, chosen, shares), layer.expected(x, chosen, shares))
    same = torch.full_like(chosen, 4)
    assert_close(layer.experts(x, same, shares), layer.expected(x, same, shares))
    assert layer.counts.tolist() == [40, 40, 40, 0, 120, 0, 0]
    assert layer.experts(x[:0], chosen[:0], shares[:0]).shape == (0, HIDDEN)


def test_more_rows_than_are_computed_at_a_time() -> None:
    """4096 choices are; they are counted once."""
    layer, x = Layer(hidden=20, width=12, shared=16), randn(3001, 20)
    chosen, shares = routed(3001)
    assert_close(layer.experts(x, chosen, shares), layer.expected(x, chosen, shares))
    assert torch.equal(layer.counts, torch.bincount(chosen.flatten(), minlength=NUMBER))


@pytest.mark.parametrize("late", [1, PER_TOKEN - 1])
@pytest.mark.parametrize("shared", [0, SHARED])
@pytest.mark.usefixtures("tile_isa")
def test_a_sum_may_come_in_two(late: int, shared: int) -> None:
    """The bits of a row are those of the row alone, and each choice is counted once."""
    layer, x = Layer(shared=shared), randn(30, HIDDEN)
    chosen, shares = routed(30)
    is_late = torch.arange(PER_TOKEN) >= PER_TOKEN - late
    early_sum, late_of = layer.experts.in_two(x, chosen, shares, late=late)
    late_sum = late_of()
    assert torch.equal(layer.counts, torch.bincount(chosen.flatten(), minlength=NUMBER))
    assert_close(early_sum, layer.expected(x, chosen, shares * ~is_late))
    of_shared = 0 if layer.shared is None else layer.one(layer.shared, x)
    assert_close(late_sum, layer.expected(x, chosen, shares * is_late) - of_shared)
    for row in range(30):
        part = slice(row, row + 1)
        alone, late_of_row = layer.experts.in_two(x[part], chosen[part], shares[part], late=late)
        assert torch.equal(alone, early_sum[part])
        assert torch.equal(late_of_row(), late_sum[part])


def expert_factors(experts: Sequence[int], *, seed: int) -> dict[int, ExpertFactors]:
    """Of an adapter that leaves gates as they are; its ranks differ."""
    found: dict[int, ExpertFactors] = {}
    for number in experts:
        at, rank = seed + 10 * number, 1 + number
        up = LowRankFactors(randn(rank, HIDDEN, seed=at) / 8, randn(WIDTH, rank, seed=at + 1))
        down = LowRankFactors(randn(3, WIDTH, seed=at + 2) / 8, randn(HIDDEN, 3, seed=at + 3))
        found[number] = None, *(LowRankFactors(*(each.bfloat16().float() for each in pair)) for pair in (up, down))
    return found


def adapted_mlp(layer: Layer, number: int, rows: torch.Tensor, factors: ExpertFactors) -> torch.Tensor:
    """What an expert computes by itself with an adapter."""
    mlp, (_, up, down) = layer.mlps[number], factors
    assert up is not None
    assert down is not None
    both = mlp.gate_up(rows, mlp.gate_up_bias)
    both[:, WIDTH:] += rows.float() @ up.down.T @ up.up.T
    gated = layer.ops.gated(both, layer.activation)
    return mlp.down.logits(gated).double() + (gated.float() @ down.down.T @ down.up.T).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("tile_isa")
def test_choices_of_rows_with_adapters_have_their_products_in_any_batch(dtype: torch.dtype) -> None:
    x, (chosen, shares) = randn(30, HIDDEN, dtype=dtype), routed(30)
    numbers = torch.tensor([0, 2, 1, 64, 2] * 6)
    held = {2: expert_factors(range(NUMBER), seed=3), 64: expert_factors((1, 4), seed=7), 1: {}}
    outcomes = []
    for team in TEAMS:
        layer = Layer(team=team, shared=SHARED, dtype=dtype)
        plain = layer.experts(x, chosen, shares)
        for number, factors in held.items():
            layer.experts.hold_adapter(number, factors, dtype, max_rank=16)
        outcomes.append(layer.experts(x, chosen, shares, numbers))
        early, late_of = layer.experts.in_two(x, chosen, shares, late=1, numbers=numbers)
        if dtype == torch.float32:
            assert_close(early + late_of(), outcomes[-1].double())
    assert all(torch.equal(each, outcomes[0]) for each in outcomes), "bits do not depend on the team"
    is_plain = (numbers == 0) | (numbers == 1)
    assert torch.equal(outcomes[0][is_plain], plain[is_plain])
    for row in range(1, 30, 7):
        one = slice(row, row + 1)
        alone = layer.experts(x[one], chosen[one], shares[one], numbers[one])
        assert torch.equal(alone, outcomes[0][one]), "nor on other rows"
    expected = layer.expected(x, chosen, shares)
    for adapter, factors in held.items():
        for number, each in factors.items():
            own = (chosen == number) & (numbers == adapter)[:, None]
            change = adapted_mlp(layer, number, x, each) - layer.one(layer.mlps[number], x)
            expected += (shares.double() * own).sum(1, keepdim=True) * change
    if dtype == torch.float32:
        assert_close(outcomes[0], expected)
    else:
        torch.testing.assert_close(outcomes[0].double(), expected, rtol=0, atol=2**-7 * float(expected.abs().max()))
    layer.experts.hold_adapter(2, {}, dtype, max_rank=16)
    forgotten = layer.experts(x, chosen, shares, numbers)
    assert torch.equal(forgotten[numbers == 2], plain[numbers == 2])


def test_gates_and_ups_may_be_stored_apart() -> None:
    for formats in ((WeightFormat(8, 32), torch.bfloat16), (torch.float32, WeightFormat(4, 32, has_minimum=True))):
        layer, x = Layer(gate_up=formats, biased=True), randn(19, HIDDEN)
        chosen, shares = routed(19)
        assert_close(layer.experts(x, chosen, shares), layer.expected(x, chosen, shares))


def test_experts_that_move_are_used_by_steps_that_were_recorded_before() -> None:
    """And those that went are not; other formats need no other memory."""
    layer, x = Layer(gate_up=[WeightFormat(4, 32)], down=torch.bfloat16), randn(5, HIDDEN)
    chosen, shares = routed(5)
    layer.experts.hold({0: layer.mlps[0]})
    with layer.op_queue.computing_in(Arena()), layer.op_queue.recording() as recorded:
        y = layer.experts(x, chosen, shares)
    others = Layer(gate_up=[torch.float32]).mlps
    moved = {number: others[number] for number in (1, 2, 5)}
    layer.experts.hold(moved)
    layer.op_queue.replay(recorded)
    assert_close(y, layer.expected(x, chosen, shares, moved))


def test_what_it_cannot_read_is_refused() -> None:
    layer, (chosen, shares) = Layer(), routed(4)
    with pytest.raises(ValueError, match="contiguous"):
        layer.experts(randn(4, 2 * HIDDEN)[:, :HIDDEN], chosen, shares)
    with pytest.raises(ValueError, match=r"these are torch\.int32"):
        layer.experts(randn(4, HIDDEN), chosen.int(), shares)
    foreign = layer.mlps[0]._replace(down=JoinedWeights([layer.mlps[0].down], [HIDDEN]))
    layer.experts.hold({0: foreign})
    with pytest.raises(TypeError, match="not of _Foreign"):
        layer.experts.hold({0: layer.mlps[0]._replace(gate_up=_Foreign())})


class _Foreign(PackedWeight):
    def __call__(self, x: torch.Tensor, _bias: torch.Tensor | None, /) -> torch.Tensor:
        return x
