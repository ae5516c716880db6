"""Choice of experts: the rule that every device follows to the last bit, by torch's operators.

All ranks that own experts of a layer choose by themselves, from residual streams that are equal to the last bit. If two
ranks disagreed on a token's second-best expert, the token would get both or neither. So each step of the rule is an
addition, product or quotient of float32, which all machines round alike, in an order that is fixed. Sums are of blocks
of 256 terms, which are 16 vectors of 16 lanes: the second half of the vectors is added to the first until one is left.
Blocks are added in their order, then lanes are halved as the vectors were. Exponentials are polynomials, and roots are
Newton's steps. Of scores that tie, the lower number wins.

`native/compute/route.c` and `kernels/routing.py` follow the same rule. Products must be rounded before they are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional as F

from hetero_api.model_parts import ExpertsConfig, Routing
from hetero_api.rank_memory import ROUTER_TERMS_AT_ONCE

_RSQRT_BITS: Final = 0x5F375A86
LANES: Final = 16
BLOCK: Final = 256
"""Terms of a sum that are added up before they are added to earlier ones."""
_EXP_LIMIT: Final = 86.0
TO_TWOS: Final = float.fromhex("0x1.715476p0")
TWO_HIGH: Final = float.fromhex("0x1.62e4p-1")
TWO_LOW: Final = float.fromhex("0x1.7f7d1cp-20")
FACTORS: Final = (0.00139337332, 0.00836323538, 0.0416664642, 0.166665766, 0.5)
"""Of the polynomial, the highest power's first."""


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Loaded weights of a layer's router, and the norm of its input."""

    experts: ExpertsConfig
    weight: torch.Tensor
    """[experts, hidden], of floats as wide as they are stored."""
    norm: torch.Tensor
    """[hidden]."""
    eps: float
    bias: torch.Tensor | None = None
    """float32 [experts]; None: there is none."""
    correction: torch.Tensor | None = None
    """float32 [experts], added to scores for the choice only; None: nothing is."""
    factors: torch.Tensor | None = None
    """float32 [experts]: of experts' shares; None: there are none."""
    by_share: bool = False
    """Whether choices are in the order of their shares, the largest first, in place of that of the choice."""


def fixed_sums(terms: torch.Tensor) -> torch.Tensor:
    """Return sums [...] of float32 terms [..., n] over the last dimension, in the fixed order."""
    blocks = -(-terms.shape[-1] // BLOCK)
    vectors = F.pad(terms, (0, -terms.shape[-1] % BLOCK)).view(*terms.shape[:-1], blocks, BLOCK // LANES, LANES)
    sums = _halved(vectors, -2)
    lanes = sums[..., 0, :]
    for number in range(1, blocks):
        lanes = lanes + sums[..., number, :]
    return _halved(lanes, -1)


def fixed_exp(x: torch.Tensor) -> torch.Tensor:
    """Return e to the x, float32, for x of at most 86 from 0; larger ones count as 86. NaN stays NaN."""
    x = x.clamp(-_EXP_LIMIT, _EXP_LIMIT)
    twos = (x * TO_TWOS).round_()
    rest = x - twos * TWO_HIGH
    rest -= twos * TWO_LOW
    power = torch.full_like(rest, FACTORS[0])
    for factor in FACTORS[1:]:
        power = power * rest + factor
    power = power * (rest * rest) + rest + 1.0
    exponents = (twos.nan_to_num_().int() + 127) << 23
    return power * exponents.view(torch.float32)


def fixed_rsqrt(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / √x, float32, of positive numbers, in Newton's steps: libraries do not all round roots alike."""
    half, result = x * 0.5, (_RSQRT_BITS - (x.view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(4):
        result = result * (1.5 - half * result * result)
    return result


def router_logits(hidden: torch.Tensor, router: RouterWeights) -> torch.Tensor:
    """Return logits, float32 [tokens, experts], of the residual stream [tokens, hidden]; they include no bias."""
    width = hidden.shape[1]
    at_once = max(1, ROUTER_TERMS_AT_ONCE // (len(router.weight) * width))
    weight, norm = router.weight.float(), router.norm.float()
    out = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    for begin in range(0, len(hidden), at_once):
        exact = hidden[begin : begin + at_once].float()
        factors = fixed_rsqrt(fixed_sums(exact * exact) * (1.0 / width) + router.eps)
        sums = fixed_sums((exact * norm).unsqueeze(1) * weight)
        out[begin : begin + at_once] = sums * factors.unsqueeze(1)
    return out


def choose(logits: torch.Tensor, router: RouterWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts' numbers, best first, and their shares, [tokens, chosen] each, by `router_logits`.

    If the router orders them by share, the best have the largest shares.
    """
    routing, number = router.experts.routing, router.experts.per_token
    if router.bias is not None:
        logits = logits + router.bias
    scores = 1.0 / (fixed_exp(-logits) + 1.0) if routing.score == "sigmoid" else logits
    preferred = scores if router.correction is None else scores + router.correction
    if routing.kept_groups < routing.groups:
        preferred = of_best_groups(preferred, routing)
    chosen = best_first(preferred, number)
    shares, total = scores.gather(1, chosen), None
    if routing.score == "softmax":
        exponentials = fixed_exp(logits - logits.amax(dim=1, keepdim=True))
        shares, total = exponentials.gather(1, chosen), exponentials
    if routing.normalised:
        total = shares
    if total is not None:
        shares = shares / fixed_sums(total).unsqueeze(1)
    shares = shares * routing.scale
    if router.factors is not None:
        shares = shares * router.factors[chosen]
    if router.by_share:
        order = best_first(shares, number)
        chosen, shares = chosen.gather(1, order), shares.gather(1, order)
    return chosen, shares


def best_first(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Return the columns of the largest scores [tokens, experts], int64 [tokens, number]; of equals the lower first."""
    # topk does not define which of two equal scores it takes.
    return scores.argsort(dim=1, descending=True, stable=True)[:, :number]


def of_best_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return scores [tokens, experts] with -∞ for experts of all but a token's best groups."""
    by_group = scores.view(len(scores), routing.groups, scores.shape[1] // routing.groups)
    best = by_group.sort(dim=2, descending=True).values
    sums = best[:, :, 0] + best[:, :, 1] if best.shape[2] > 1 else best[:, :, 0]
    kept = best_first(sums, routing.kept_groups)
    is_kept = torch.zeros(sums.shape, dtype=torch.bool, device=scores.device).scatter_(1, kept, True)
    return by_group.masked_fill(~is_kept.unsqueeze(2), float("-inf")).flatten(1)


def _halved(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return x without a dimension, along which the second half is added to the first until one element is left."""
    while (width := x.shape[dim]) > 1:
        x = x.narrow(dim, 0, width // 2) + x.narrow(dim, width // 2, width // 2)
    return x.squeeze(dim)
