"""The least time in which a device can do given steps: what measured times are compared with.

A step reads each weight that it multiplies with once, and the keys and values of all tokens that are attended to; it
multiplies each row with each weight, and each query head with each key and value that it attends to. Reading and
multiplying can go on at once, so with measured bandwidth B and rate F a step takes at least

    max( size · (weights + 2 · layers · kv_heads · head_dim · tokens) / B,
         (2 · body · rows + 2 · head · draws + 4 · layers · heads · head_dim · pairs) / F )

where `size` is bytes an element, `body` the weights of all layers (of experts those that rows choose on
average, if each chooses at random), `head` those of the output head (read, and counted
in `weights`, only in steps that draw), `tokens` those whose keys are read, each once for each sequence, and `pairs`
the pairs of a row and a token that it attends to. Activations, and embeddings that are looked up, are left out: they
are little, and leaving them out makes the bound lower and shares of it smaller. Steps follow one another, so the bound
of a run is the sum over its steps, as they were scheduled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from hetero_api.model_config import ModelConfig
from hetero_gateway.engine.step import ScheduledStep


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device was measured to do, in the run that it is used for."""

    bandwidth: float
    """Bytes read a second."""
    flops: float
    """Of a large product of matrices in the arithmetic type, a second."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step cannot do without; see the module."""

    rows: int
    draws: int
    tokens: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of one model in one arithmetic type on one device."""

    config: ModelConfig
    element_bytes: int
    rates: Rates

    @property
    def _head(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def _body(self) -> int:
        """Without routed experts."""
        embeddings = self._head * (1 if self.config.tie_word_embeddings else 2)
        return self.config.num_parameters - embeddings - self._experts

    @property
    def _experts(self) -> int:
        experts = self.config.experts
        return len(experts.layers) * experts.number * self.config.params_per_expert if experts is not None else 0

    def _chosen(self, rows: int) -> float:
        """Share of the experts that some row chooses."""
        experts = self.config.experts
        return 1 - (1 - experts.per_token / experts.number) ** rows if experts is not None else 0.0

    def read_bytes(self, work: StepWork) -> int:
        """What the step reads at least."""
        config = self.config
        cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * work.tokens
        experts = round(self._experts * self._chosen(work.rows))
        return self.element_bytes * (self._body + experts + (self._head if work.draws else 0) + cached)

    def flops(self, work: StepWork) -> int:
        """What the step multiplies and adds at least."""
        config = self.config
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * work.pairs
        experts = round(self._experts * self._chosen(1))
        return 2 * (self._body + experts) * work.rows + 2 * self._head * work.draws + attention

    def step_s(self, work: StepWork) -> float:
        """The least time of the step, seconds."""
        return max(self.read_bytes(work) / self.rates.bandwidth, self.flops(work) / self.rates.flops)

    def run_s(self, works: Iterable[StepWork]) -> float:
        """The least time of steps that follow one another."""
        return sum(map(self.step_s, works))


def works_of(steps: Iterable[ScheduledStep]) -> Iterator[StepWork]:
    """What each of a scheduler's steps has to do. `steps` are all since its first, in order."""
    computed: dict[Hashable, int] = {}
    for step in steps:
        tokens = pairs = 0
        for completion in step.decodes.completions:
            computed[completion] = length = computed.get(completion, 0) + 1
            tokens += length
            pairs += length
        for span in step.spans:
            computed[span.completion] = span.end
            tokens += span.end
            pairs += _pairs(span.begin, span.end)
        draws = len(step.decodes.completions) + sum(span.sample for span in step.spans)
        yield StepWork(step.num_tokens, draws, tokens, pairs)


def _pairs(begin: int, end: int) -> int:
    """Rows [begin, end) of a sequence, each of which attends to all before it and to itself."""
    return (end * (end + 1) - begin * (begin + 1)) // 2
