"""The native choice of experts is torch's to the last bit, and the exact one but for near ties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hetero_api.model_parts import ExpertsConfig, Routing
from hetero_worker.kernels.expert_choice import RouterWeights, fixed_exp
from hetero_worker.layers.fused_ops import PLAIN_OPS
from hetero_worker.layers.native_ops import NativeOps
from tests.support.native_compute import TEAMS, op_queue_of, randn

pytestmark = pytest.mark.unit

EPS = 1e-6
RULES = {
    "softmax": Routing(),
    "softmax over all": Routing(normalised=False, scale=1.5),
    "biased": Routing(biased=True),
    "sigmoid": Routing("sigmoid", corrected=True),
    "sigmoid as it is": Routing("sigmoid", normalised=False),
    "groups": Routing("sigmoid", corrected=True, scale=2.5, groups=4, kept_groups=2),
    "many groups": Routing("sigmoid", normalised=False, corrected=True, groups=6, kept_groups=5),
}
SHAPES = [(1, 12, 1), (7, 12, 5), (256, 24, 8), (300, 36, 4), (2880, 132, 9)]
"""Hidden size, experts, experts a token."""
POSSIBLE = {(0, 2, 4, 6), (1, 3, 5, 7), (0, 2, 6, 8), (3, 5, 9, 11)}
"""Choices among 12 experts of which every second one is the same; the last two are of groups of three."""
each_rule = pytest.mark.parametrize("rule", RULES)


def router_of(
    shape: tuple[int, int, int], routing: Routing, dtype: torch.dtype = torch.float32, norm: torch.dtype = torch.float32
) -> RouterWeights:
    width, number, per_token = shape
    return RouterWeights(
        ExpertsConfig(number, per_token, 8, layers=(0,), routing=routing),
        (randn(number, width, seed=1) / width**0.5).to(dtype),
        (1 + randn(width, seed=2) / 4).to(norm),
        EPS,
        randn(number, seed=3) if routing.biased else None,
        randn(number, seed=4) / 4 if routing.corrected else None,
    )


@each_rule
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("isa")
def test_it_is_the_same_to_the_last_bit(shape: tuple[int, int, int], rule: str) -> None:
    types = (torch.float32, torch.bfloat16, torch.float16)
    for number, team in enumerate(TEAMS):
        router = router_of(shape, RULES[rule], types[number], types[number % 2])
        hidden = 3 * randn(5, shape[0], dtype=types[number % 2])
        expected, shares = PLAIN_OPS.route(hidden, router)
        chosen, weights = NativeOps(op_queue_of(team)).route(hidden, router)
        assert torch.equal(chosen, expected)
        assert torch.equal(weights, shares)


@each_rule
@pytest.mark.usefixtures("isa")
def test_choices_may_be_in_the_order_of_their_shares(rule: str) -> None:
    """A correction changes who is chosen, and not how much each counts."""
    router, hidden = router_of((300, 36, 6), RULES[rule]), randn(20, 300)
    chosen, shares = PLAIN_OPS.route(hidden, router)
    ordered = replace(router, by_share=True)
    for ops in (PLAIN_OPS, NativeOps(op_queue_of(2))):
        by_share, sorted_shares = ops.route(hidden, ordered)
        assert torch.equal(sorted_shares, shares.sort(dim=1, descending=True).values)
        assert torch.equal(by_share, chosen.gather(1, shares.argsort(dim=1, descending=True, stable=True)))
    assert torch.equal(by_share, chosen) is not (rule in ("sigmoid", "groups", "many groups"))


@each_rule
@pytest.mark.usefixtures("isa")
def test_a_rows_choice_is_its_own(rule: str) -> None:
    router, hidden = router_of((300, 36, 4), RULES[rule]), randn(530, 300)
    whole = PLAIN_OPS.route(hidden, router)
    for team in TEAMS:
        ops = NativeOps(op_queue_of(team))
        for rows in (*range(1, 71, 3), 256, 257, 530):
            for found, expected in zip(ops.route(hidden[-rows:], router), whole, strict=True):
                assert torch.equal(found, expected[-rows:])
    for row in range(3):
        alone = PLAIN_OPS.route(hidden[row : row + 1], router)
        assert all(torch.equal(found[0], expected[row]) for found, expected in zip(alone, whole, strict=True))


@each_rule
@pytest.mark.usefixtures("isa")
def test_of_experts_that_tie_the_lower_number_wins(rule: str) -> None:
    """All experts have one of two rows, so do all groups."""
    router = router_of((40, 12, 4), RULES[rule])
    router.weight.copy_(router.weight[:2].repeat(6, 1))
    for addend in (router.bias, router.correction):
        if addend is not None:
            addend.zero_()
    for ops in (PLAIN_OPS, NativeOps(op_queue_of())):
        chosen, shares = ops.route(randn(50, 40), router)
        assert {tuple(row) for row in chosen.tolist()} <= POSSIBLE
        assert torch.equal(shares[:, 0], shares[:, 1])


@pytest.mark.parametrize("rule", ["softmax", "groups"])
def test_choices_are_the_exact_ones_but_for_near_ties(rule: str) -> None:
    """10,000 of them, against float64."""
    routing, (width, number, per_token) = RULES[rule], (512, 32, 4)
    router, hidden = router_of((width, number, per_token), routing), randn(10_000, width)
    exact = hidden.double()
    normed = exact / (exact.square().mean(1, keepdim=True) + EPS).sqrt() * router.norm.double()
    scores = normed @ router.weight.double().T
    is_clear = torch.ones(len(hidden), dtype=torch.bool)
    if router.correction is not None:
        scores = scores.sigmoid() + router.correction
        groups = scores.view(len(scores), routing.groups, -1)
        sums = groups.topk(2, dim=2).values.sum(2)
        ranked = sums.sort(descending=True)
        is_clear &= ranked.values[:, routing.kept_groups - 1] - ranked.values[:, routing.kept_groups] > 1e-5
        is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, ranked.indices[:, : routing.kept_groups], True)
        scores = groups.masked_fill(~is_kept.unsqueeze(2), float("-inf")).flatten(1)
    best = scores.sort(descending=True)
    is_clear &= (best.values[:, :per_token] - best.values[:, 1 : per_token + 1] > 1e-5).all(1)
    assert is_clear.sum() > 9_900
    chosen, _ = NativeOps(op_queue_of()).route(hidden, router)
    assert torch.equal(chosen[is_clear], best.indices[is_clear, :per_token])


def test_what_is_no_number_chooses_experts_that_exist() -> None:
    hidden = randn(3, 40)
    hidden[1, 7], hidden[2] = torch.nan, torch.inf
    for rule in RULES.values():
        chosen, shares = NativeOps(op_queue_of()).route(hidden, router_of((40, 12, 4), rule))
        assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in chosen.tolist())
        assert shares[0].isfinite().all()
        assert shares[1:].isnan().all()


def test_exponentials_are_within_two_units_of_the_last_place() -> None:
    x = torch.linspace(-85, 85, 100_001)
    exact = x.double().exp()
    assert ((fixed_exp(x).double() - exact).abs() / exact).max() < 2**-22
    assert fixed_exp(torch.tensor([torch.nan, torch.inf, -torch.inf])).isnan().tolist() == [True, False, False]
