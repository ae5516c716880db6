"""Sampling parameters of one sequence, and of one token to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from hetero_api.v1 import ranks_pb2
from hetero_worker.sampling.edits import Bias, LogitEdits, Penalties, TokenCounts, mask_without
from hetero_worker.sampling.noise import NoiseKey

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below are greedy: dividing by them overflows."""


class SamplingRow(NamedTuple):
    """One token to draw. Edits come first, then the temperature, then the filters top_k, top_p, min_p."""

    temperature: float
    top_k: int
    """0 means all."""
    top_p: float
    """1 means all."""
    min_p: float
    """0 means all."""
    seed: int
    position: int
    """Index of the drawn token in its sequence. Seed and position are the key of the noise."""
    edits: LogitEdits | None = None
    """Valid until the sequence's next token is appended."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens are reported with the drawn one; None: no log-probabilities at all."""

    @property
    def is_greedy(self) -> bool:
        """True if the token is the largest logit."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def noise_temperature(self) -> float:
        """Temperature of a draw with noise; 0 for the largest logit."""
        return 0.0 if self.is_greedy else self.temperature

    @property
    def is_filtered(self) -> bool:
        """True if a part of the vocabulary may be cut off before the draw."""
        return not self.is_greedy and (self.top_k > 0 or self.has_nucleus or self.min_p > 0.0)

    @property
    def has_nucleus(self) -> bool:
        """True if top_p cuts anything off."""
        return 0.0 < self.top_p < 1.0

    @property
    def noise_key(self) -> NoiseKey:
        """Key of the draw's noise."""
        return NoiseKey(self.seed, self.position)


class SequenceSampling:
    """Sampling state of one sequence: its parameters, the number of its tokens, and the counts for penalties.

    Ranks keep one for each slot and append every sampled token. After a preemption it is made again from prompt and
    output, and draws the same tokens.
    """

    def __init__(
        self, sampling: ranks_pb2.Sampling, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()
    ) -> None:
        self._sampling = sampling
        self._num_prompt, self._num_output = len(prompt_token_ids), len(output_token_ids)
        self._bias = _bias_of(sampling)
        self._penalties = _penalties_of(sampling, prompt_token_ids, output_token_ids)
        self._end_ids = np.array(sampling.end_token_ids, dtype=np.int64)
        self.num_logprobs = sampling.num_logprobs if sampling.HasField("num_logprobs") else None
        self.num_prompt_logprobs = sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None
        self.pooling = sampling.pooling
        is_edited = self._bias is not None or self._penalties is not None
        self._is_unedited = not (is_edited or self.num_logprobs is not None)

    @property
    def is_plain(self) -> bool:
        """True if the next token and all after it are drawn from unedited logits, without log-probabilities."""
        return self._is_unedited and (not len(self._end_ids) or self._num_output >= self._sampling.min_tokens)

    def append(self, token_id: int) -> None:
        """Add the next output token."""
        self._num_output += 1
        if self._penalties is not None:
            self._penalties.counts.append(token_id)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the next output tokens."""
        self._num_output += len(token_ids)
        if self._penalties is not None:
            for token_id in token_ids:
                self._penalties.counts.append(token_id)

    def expect(self) -> None:
        """Count an output token whose id is not known yet; `settle` names it before the next one is expected."""
        self._num_output += 1

    def settle(self, token_id: int) -> None:
        """Name the token that was expected."""
        if self._penalties is not None:
            self._penalties.counts.append(token_id)

    def draw(self, mask: bytes | None = None, *, ahead: Sequence[int] = ()) -> SamplingRow:
        """Return how the next token is drawn, or the one that follows tokens `ahead`, which are not appended.

        `mask` has the format of TokenMasks.
        """
        sampling = self._sampling
        return SamplingRow(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            position=self._num_prompt + self._num_output + len(ahead),
            edits=self._edits(mask, ahead),
            num_logprobs=self.num_logprobs,
        )

    def _edits(self, mask: bytes | None, ahead: Sequence[int]) -> LogitEdits | None:
        is_short = self._num_output + len(ahead) < self._sampling.min_tokens
        banned = self._end_ids if is_short and len(self._end_ids) else None
        penalties = self._penalties
        if penalties is not None and ahead:
            penalties = replace(penalties, counts=penalties.counts.followed_by(ahead))
        if mask is None:
            if banned is None and self._bias is None and penalties is None:
                return None
            return LogitEdits(self._bias, penalties, banned)
        allowed = np.frombuffer(mask, dtype=np.uint8)
        if banned is not None:
            allowed = mask_without(allowed, banned)
        return LogitEdits(self._bias, penalties, mask=allowed)


def _bias_of(sampling: ranks_pb2.Sampling) -> Bias | None:
    if not sampling.bias_token_ids:
        return None
    ids = np.array(sampling.bias_token_ids, dtype=np.int64)
    return Bias(ids, np.array(sampling.biases, dtype=np.float32))


def _penalties_of(sampling: ranks_pb2.Sampling, prompt: Sequence[int], output: Sequence[int]) -> Penalties | None:
    repetition = sampling.repetition_penalty or 1.0
    if repetition == 1.0 and sampling.presence_penalty == 0.0 and sampling.frequency_penalty == 0.0:
        return None
    counts = TokenCounts(seen=prompt if repetition != 1.0 else (), counted=output)
    return Penalties(sampling.presence_penalty, sampling.frequency_penalty, repetition, counts)
