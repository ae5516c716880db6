"""Mutants of the sampler: each must fail a check that the product passes elsewhere in these tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hetero_worker.layers import sampler
from hetero_worker.sampling import edits, shard
from hetero_worker.sampling.decision import merge_best
from hetero_worker.sampling.edits import Bias, LogitEdits, Penalties, TokenCounts
from hetero_worker.sampling.logprobs import count_before
from hetero_worker.sampling.noise import NoiseKey, gumbel_noise
from hetero_worker.sampling.request import SequenceSampling
from hetero_worker.sampling.shard import Float64Array
from tests.support.sampling_checks import (
    VOCABULARY,
    check_distribution,
    check_generation,
    check_identity,
    check_logprobs,
    check_masked_sampling,
    check_wide_nuclei,
)
from tests.support.sampling_reference import Draw, random_draw, sampling_of

pytestmark = pytest.mark.unit

Patch = pytest.MonkeyPatch
Check = Callable[[], None]


def _identity() -> None:
    check_identity([random_draw(seed, vocabulary=VOCABULARY) for seed in range(40)])


def _unfiltered() -> None:
    """Draws that ranks make of their shards, edits included."""
    draws = [random_draw(seed, vocabulary=VOCABULARY) for seed in range(40)]
    for draw in draws:
        draw.sampling.top_k, draw.sampling.top_p, draw.sampling.min_p = 0, 1.0, 0.0
    check_identity(draws)


def _generation() -> None:
    check_generation([random_draw(1000 + seed, vocabulary=VOCABULARY) for seed in range(20)], (300, 212))


def _distribution() -> None:
    logits = np.random.default_rng(8).normal(0, 1.5, 40).astype(np.float32)
    check_distribution(Draw(logits, sampling_of(seed=77, top_p=0.9)), (23, 17), positions=3000)


def _logprobs() -> None:
    check_logprobs((300, 212))


def _drops_a_shard(patch: Patch) -> None:
    patch.setattr(sampler, "merge_best", lambda best: merge_best(best[:1]))


def _drops_a_shard_of_whole_rows(patch: Patch) -> None:
    gather = sampler.gather_logits

    def mutant(logits: torch.Tensor, head_ranges: Any, exchange: Any) -> torch.Tensor:
        whole = gather(logits, head_ranges, exchange)
        whole[:, head_ranges[-1].begin :] = -np.inf
        return whole

    patch.setattr(sampler, "gather_logits", mutant)


def _filters_within_shards(patch: Patch) -> None:
    patch.setattr(sampler, "_whole_rows", lambda rows, shards: iter(()))


def _keys_noise_without_the_row(patch: Patch) -> None:
    patch.setattr(shard, "gumbel_noise", lambda keys, *, begin, count: gumbel_noise(keys, begin=0, count=count))


def _keys_noise_without_the_position(patch: Patch) -> None:
    def mutant(keys: list[NoiseKey], *, begin: int, count: int) -> torch.Tensor:
        return gumbel_noise([NoiseKey(key.seed, 0) for key in keys], begin=begin, count=count)

    patch.setattr(shard, "gumbel_noise", mutant)


def _penalises_twice(patch: Patch) -> None:
    apply = Penalties.apply

    def mutant(self: Penalties, logits: Any, begin: int) -> None:
        apply(self, logits, begin)
        apply(self, logits, begin)

    patch.setattr(Penalties, "apply", mutant)


def _counts_an_appended_token_twice(patch: Patch) -> None:
    append = TokenCounts.append

    def mutant(self: TokenCounts, token_id: int) -> None:
        append(self, token_id)
        append(self, token_id)

    patch.setattr(TokenCounts, "append", mutant)


def _forgets_appended_tokens(patch: Patch) -> None:
    patch.setattr(TokenCounts, "append", lambda self, token_id: None)


def _counts_prompts_as_output(patch: Patch) -> None:
    create = SequenceSampling.__init__
    patch.setattr(SequenceSampling, "__init__", lambda self, s, p, o=(): create(self, s, (), (*p, *o)))


def _edits_without_the_offset(owner: type[Any]) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        apply = owner.apply
        patch.setattr(owner, "apply", lambda self, logits, begin: apply(self, logits, 0))

    return mutate


def _reads_masks_highest_bit_first(patch: Patch) -> None:
    def mutant(mask: Any, begin: int, count: int) -> Any:
        return np.unpackbits(mask)[begin : begin + count] == 0

    patch.setattr(edits, "_masked_out", mutant)


def _counts_ranks_in_one_shard(patch: Patch) -> None:

    def mutant(logits: Any, targets: Any, told: Any, begin: int) -> Float64Array:
        return count_before(logits, targets, told, begin) * (begin == 0)

    patch.setattr(sampler, "count_before", mutant)


def _tells_logprobs_of_edited_logits(patch: Patch) -> None:
    """In place, as a sampler that saves a copy would."""

    def mutant(logits: torch.Tensor, rows: Any, chosen: Any, begin: int) -> torch.Tensor:
        for i in chosen:
            if rows[i].edits is not None:
                rows[i].edits.apply(logits[i].numpy(), begin)
        return shard.take_rows(logits, list(chosen))

    patch.setattr(shard, "edited_logits", mutant)


MUTANTS: dict[str, tuple[Callable[[Patch], None], Check]] = {
    "drops a shard": (_drops_a_shard, _identity),
    "drops a shard of whole rows, distribution": (_drops_a_shard_of_whole_rows, _distribution),
    "noise without the row": (_keys_noise_without_the_row, _identity),
    "noise without the position": (_keys_noise_without_the_position, _identity),
    "penalises twice": (_penalises_twice, _identity),
    "drops a shard of whole rows": (_drops_a_shard_of_whole_rows, check_wide_nuclei),
    "filters within shards": (_filters_within_shards, _distribution),
    "counts an appended token twice": (_counts_an_appended_token_twice, _generation),
    "forgets appended tokens": (_forgets_appended_tokens, _generation),
    "counts prompts as output": (_counts_prompts_as_output, _identity),
    "bias without the offset": (_edits_without_the_offset(Bias), _unfiltered),
    "penalties without the offset": (_edits_without_the_offset(Penalties), _unfiltered),
    "all edits without the offset": (_edits_without_the_offset(LogitEdits), check_masked_sampling),
    "masks highest bit first": (_reads_masks_highest_bit_first, check_masked_sampling),
    "ranks of one shard": (_counts_ranks_in_one_shard, _logprobs),
    "logprobs of edited logits": (_tells_logprobs_of_edited_logits, _logprobs),
}


CHECKS = [_identity, _unfiltered, _generation, _distribution, _logprobs, check_masked_sampling, check_wide_nuclei]


@pytest.mark.parametrize("check", CHECKS)
def test_the_product_passes(check: Check) -> None:
    check()


@pytest.mark.parametrize(("mutate", "check"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_caught(mutate: Callable[[Patch], None], check: Check, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()
