"""Choices of experts by our kernel are those of the rule, to the last bit, and padding chooses nothing."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from hetero_api.model_parts import ExpertsConfig, Routing
from hetero_worker.kernels import expert_choice
from hetero_worker.kernels.expert_choice import RouterWeights
from hetero_worker.kernels.grouped_matmul import SortedChoices
from hetero_worker.kernels.routing import choose
from tests.support.seeded import seeded

pytestmark = pytest.mark.unit

ROUTERS: Final[dict[str, tuple[int, int, Routing]]] = {
    "one expert": (1, 1, Routing("softmax")),
    "mixtral": (8, 2, Routing("softmax", normalised=True)),
    "qwen3": (128, 8, Routing("softmax", normalised=True)),
    "qwen3-next": (512, 10, Routing("softmax", normalised=True)),
    "of all": (60, 4, Routing("softmax")),
    "of many": (320, 4, Routing("softmax", scale=1.7)),
    "gpt-oss": (32, 4, Routing("softmax", normalised=True, biased=True)),
    "deepseek": (256, 8, Routing("sigmoid", normalised=True, corrected=True, groups=8, kept_groups=4, scale=2.5)),
    "three groups": (6, 3, Routing("sigmoid", normalised=True, corrected=True, groups=3, kept_groups=2)),
    "groups of one": (4, 2, Routing("sigmoid", groups=4, kept_groups=3)),
    "groups of an odd width": (15, 3, Routing("sigmoid", corrected=True, groups=3, kept_groups=2)),
    "kimi": (384, 8, Routing("sigmoid", normalised=True, corrected=True, scale=2.827)),
    "scaled": (16, 4, Routing("softmax", normalised=True, scaled=True)),
    "more than a vector": (40, 17, Routing("softmax", normalised=True)),
}
each_router = pytest.mark.parametrize("name", ROUTERS)


def router_of(name: str, *, by_share: bool = False) -> RouterWeights:
    number, per_token, routing = ROUTERS[name]
    generator, none = seeded(4), torch.empty(0)

    def random() -> torch.Tensor:
        return torch.randn(number, generator=generator)

    return RouterWeights(
        ExpertsConfig(number, per_token, 8, layers=(0,), routing=routing), none, none, 0.0,
        bias=random() if routing.biased else None, correction=random() if routing.corrected else None,
        factors=random() if routing.scaled else None, by_share=by_share,
    )  # fmt: skip


def logits_of(router: RouterWeights, rows: int = 9) -> torch.Tensor:
    """Some of which tie, and some of which are large."""
    logits = torch.randn(rows, router.experts.number, generator=seeded(rows)) * 3
    logits[1] = logits[1].round()
    logits[2] *= 40
    logits[3] = 0.0
    return logits


@each_router
@pytest.mark.parametrize("by_share", [False, True], ids=["by score", "by share"])
def test_choices_and_shares_have_the_rules_bits(name: str, by_share: bool) -> None:
    router = router_of(name, by_share=by_share)
    logits = logits_of(router)
    chosen, shares = choose(logits, router)
    expected, expected_shares = expert_choice.choose(logits, router)
    assert torch.equal(chosen, expected)
    assert torch.equal(shares, expected_shares)


@each_router
def test_padding_chooses_no_expert(name: str) -> None:
    router = router_of(name)
    logits = logits_of(router)
    slots = torch.tensor([5, 0, 7, 1, 0, 0, 16, 2, 0])
    chosen, _ = choose(logits, router, slots)
    expected, _ = expert_choice.choose(logits, router)
    assert torch.equal(chosen[slots > 0], expected[slots > 0])
    assert (chosen[slots == 0] == router.experts.number).all()
    assert choose(logits[:0], router)[0].shape == (0, router.experts.per_token)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_choose_experts_that_are_there(bad: float) -> None:
    for name in ("qwen3", "deepseek", "of all"):
        router = router_of(name)
        logits = torch.full((2, router.experts.number), bad)
        chosen, _ = choose(logits, router)
        assert ((chosen >= 0) & (chosen < router.experts.number)).all()


@pytest.mark.parametrize(("tokens", "per_token"), [(1, 1), (1, 8), (16, 8), (17, 8), (3, 5)])
def test_few_choices_are_sorted_as_many_are(tokens: int, per_token: int) -> None:
    chosen = torch.randint(0, 7, (tokens, per_token), generator=seeded(tokens))  # 6: padding
    sorted_choices = SortedChoices.of(chosen, torch.arange(7))
    found, order = chosen.reshape(-1).sort(stable=True)
    assert torch.equal(sorted_choices.order, order)
    assert sorted_choices.bounds.tolist() == [int((found < number).sum()) for number in range(7)]
