"""BegunStep: a step from its plan to its tokens, and what may begin before these are known.

A step is begun when the device has been given all of it: the inputs, the forward pass, and what its draws need. It is
finished when the host knows the tokens. The next step's forward pass lacks nothing but the tokens, and the device has
guesses of them (`drawing.Guesses`). So that step may begin meanwhile, with these guesses put in on the device: it is
*chained*, and the device does not wait for the host between the two.

The host decides the tokens as ever. When one is another than was guessed, the step behind is computed anew, with the
right tokens, before anything of it was seen by anybody. That leaves nothing wrong behind:

- A wrong token's keys and values were written at its own position only, and there the second pass writes the right
  ones. The block is the sequence's own: blocks are shared, and found by their content, once the gateway has heard that
  they were computed. No other row of the step reads it, and the row's own result is dropped.
- Other rows, spans among them, are computed from the same inputs once more, and write again what they wrote.
- Draws of the first pass are dropped unread. Those of the second are keyed by seed and position, as all are.
- What the plan changed in the slots' state is not done again: only the pass is, over the same batch.

A plan may follow while a step is under way if nothing on the host but the tokens themselves is missing: it computes
something and is no command, and the device has a guess of each token that its decode rows take from the step. Draws
with edits are the host's to make, so there is none of those: a draw that depends on which tokens came before it, by
penalties, is never begun without them. Nor is one with a mask, which follows from these tokens too. Log-probabilities
are wanted neither of the step's draws nor of the plan's prompts: the host would wait for the device in the middle. And
guesses have come true of late (`trust`). A slot that the plan releases, or binds anew, goes its way: the step's token
for it is told, and no more.

Ranks of a group do not chain. What crosses the host orders their rounds: sums of a step would mix with the rounds of
the draws before, and all ranks would have to learn together that a guess was wrong. Nor do ranks that compute experts
on a device, for the host waits for it in every such layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_api.rank_memory import PROMPT_LOGIT_ROWS
from hetero_api.sharding import UnitRange
from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_worker.backends.base import HOST
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.errors import ProtocolError
from hetero_worker.layers.sampler import SampledRows, prompt_logprobs
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest, MaskSource, SampledToken, StepOutput
from hetero_worker.runners.device_inputs import stand_in_of
from hetero_worker.runners.forward import ForwardStates
from hetero_worker.runners.input_batch import InputBatch, PromptRows
from hetero_worker.runners.runner_device import ChainableInputs
from hetero_worker.runners.serving import ServingCache
from hetero_worker.runners.slots import ExpectedTokens
from hetero_worker.runners.step_times import StepTimes
from hetero_worker.runners.trust import Trust
from hetero_worker.sampling.drawing import Guesses, ShardDrawing, StartedDrawing, StartedDraws
from hetero_worker.sampling.request import SamplingRow


class SampleTokens(Protocol):
    """Draws tokens from sharded logits; layers.sampler.sample_tokens says how."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        head_ranges: Sequence[UnitRange],
        exchange: Exchange,
        drawing: ShardDrawing,
    ) -> SampledRows: ...


@dataclass(frozen=True, slots=True)
class StepMeans:
    """What a step is computed and drawn with."""

    decoder: Decoder
    cache: ServingCache
    exchange: Exchange
    head_ranges: Sequence[UnitRange]
    drawing: ShardDrawing
    sample: SampleTokens
    times: StepTimes
    trust: Trust
    inputs: ChainableInputs | None
    """The cache's, where steps are chained."""

    @property
    def own_head(self) -> UnitRange:
        return self.head_ranges[self.exchange.rank]


def unchained_because(request: LoadRequest) -> str:
    """Why a GPU rank with this order does not chain its steps; empty if it does."""
    if not request.chained:
        return "turned off"
    if request.shard_plan.world_size > 1:
        return "ranks of a group meet between steps"
    if any(layer.experts.size for layer in request.shard_plan.ranks[request.rank].layers):
        return "the host chooses which rows an expert computes"
    return ""


class DoneStep:
    """Implements StepUnderWay for what is done as soon as it is begun."""

    can_be_followed = False
    is_done = True

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def may_be_followed_by(self, plan: ranks_pb2.StepPlan) -> bool:  # noqa: ARG002
        return False

    def finish(self) -> StepOutput:
        return self._output


@dataclass(slots=True)
class _PendingDraws:
    """A step's draws, under way."""

    slots: list[int]
    rows: list[SamplingRow]
    logits: torch.Tensor
    started: StartedDraws | None
    """None on a rank without vocabulary rows."""
    expected: ExpectedTokens | None = None
    """Once the slots have gone on without them."""
    guesses: Guesses | None = None
    """Once another step was begun with them."""

    def by_guess(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of draws that were guessed, in the guesses' order."""
        assert self.started is not None
        places = {place: i for i, place in enumerate(self.started.guessed) if place is not None}
        return [tokens[places[place]] for place in range(len(places))]


class BegunStep:
    """Implements StepUnderWay; `fill`, then `compute`, begin it."""

    def __init__(self, plan: ranks_pb2.StepPlan, means: StepMeans, *, on_finished: Callable[[], None]) -> None:
        """`on_finished` is called at the end of `finish`."""
        self._plan = plan
        self._means = means
        self._on_finished = on_finished
        self._num_decode = len(plan.decode_slots)
        self._batch: InputBatch | None = None
        self._draws: _PendingDraws | None = None
        self._prompts: list[ranks_pb2.PromptSpanLogprobs] = []
        self._follower: BegunStep | None = None
        self._busy_s = 0.0

    # --- beginning --------------------------------------------------------------------------------------

    def fill(self, behind: BegunStep | None) -> None:
        """Give the device the inputs; of tokens that the step `behind` which it begins is drawing, the guesses."""
        cache = self._means.cache
        self._batch = cache.inputs.fill(self._plan, cache.slots)
        if behind is not None:
            behind._lend_guesses(self._num_decode)
            self._means.times.follow(behind._last_busy_s())

    def compute(self, masks: MaskSource) -> None:
        """The forward pass, and whatever the draws need of it. Waits for the step's masks if it has any."""
        means, batch = self._means, self._filled
        with torch.inference_mode():
            states = self._pass()
            self._prompts = [_prompt_span(prompt, states.hidden, means) for prompt in batch.prompts]
            draw_slots = batch.draw_slots.tolist()
            logits = states.logits_of(means.decoder, len(draw_slots)) if draw_slots else None
            self._advance()
            if logits is not None:
                rows = _sampling_rows(self._plan, draw_slots, means.cache, masks)
                self._draws = _PendingDraws(draw_slots, rows, logits, self._start_draws(rows, logits))
        self._busy_s = means.times.now()

    @property
    def _filled(self) -> InputBatch:
        assert self._batch is not None, "fill comes first"
        return self._batch

    def _pass(self) -> ForwardStates:
        means = self._means
        cache = means.cache
        return cache.forward.run(means.decoder, self._filled, caches=cache.layers, exchange=means.exchange)

    def _start_draws(self, rows: list[SamplingRow], logits: torch.Tensor) -> StartedDraws | None:
        own = self._means.own_head
        return self._means.drawing.start(rows, logits, own.begin) if own.size else None

    def _advance(self) -> None:
        """What the step computes is taken to be in the cache from now on."""
        cache = self._means.cache
        cache.inputs.advance_decoding(self._num_decode, cache.slots)
        for span in self._plan.spans:
            cache.slots.counts.num_computed[span.slot] += span.num_tokens

    # --- what follows before the end --------------------------------------------------------------------

    @property
    def can_be_followed(self) -> bool:
        draws, means = self._draws, self._means
        if means.inputs is None or draws is None or draws.started is None or not means.trust.is_given:
            return False
        return all(row.num_logprobs is None for row in draws.rows)

    def may_be_followed_by(self, plan: ranks_pb2.StepPlan) -> bool:
        if not self.can_be_followed or plan.HasField("command") or plan.masked_slots:
            return False
        if not (plan.decode_slots or plan.spans):
            return False
        drawing = self._places(plan)
        is_guessed = all(slot not in drawing or drawing[slot] is not None for slot in plan.decode_slots)
        return is_guessed and not any(span.slot in drawing for span in plan.spans) and not self._tells_prompts(plan)

    def _places(self, plan: ranks_pb2.StepPlan) -> dict[int, int | None]:
        """Slots that the plan finds with a token of this step's, and the guess's place."""
        draws = self._draws
        assert draws is not None
        assert draws.started is not None
        released = frozenset(plan.released_slots)
        return {s: place for s, place in zip(draws.slots, draws.started.guessed, strict=True) if s not in released}

    def _tells_prompts(self, plan: ranks_pb2.StepPlan) -> bool:
        slots = self._means.cache.slots
        return any(new.sampling.HasField("num_prompt_logprobs") for new in plan.new_sequences) or any(
            slots.wants_prompt_logprobs(span.slot) for span in plan.spans
        )

    def expect_tokens(self) -> None:
        """Have the slots go on as if the tokens were known. Idempotent."""
        draws = self._draws
        if draws is not None and draws.started is not None and draws.expected is None:
            stand_ins = [0 if place is None else stand_in_of(place) for place in draws.started.guessed]
            draws.expected = self._means.cache.slots.expect_tokens(draws.slots, stand_ins)

    def _lend_guesses(self, num_decode: int) -> None:
        """To the batch that was made last, of so many decode rows."""
        draws, inputs = self._draws, self._means.inputs
        assert draws is not None
        assert draws.started is not None
        assert inputs is not None
        if any(place is not None for place in draws.started.guessed):
            with torch.inference_mode():
                draws.guesses = draws.started.guess()
                inputs.put_guesses(num_decode, draws.guesses.ids)

    def be_followed_by(self, step: BegunStep) -> None:
        """A step has begun behind this one: it is computed anew if a guess turns out to be wrong."""
        self._follower = step

    @property
    def is_done(self) -> bool:
        draws = self._draws
        if draws is None or draws.started is None or draws.started.is_here:
            return True
        self._busy_s = self._means.times.now()
        return False

    def _last_busy_s(self) -> float | None:
        """When the device was last seen at this step; None: it is now."""
        return self._busy_s if self.is_done else None

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self) -> StepOutput:
        try:
            return self._output()
        finally:
            self._on_finished()

    def _output(self) -> StepOutput:
        draws, means = self._draws, self._means
        if draws is None:
            return StepOutput(prompt_logprobs=self._prompts)
        drawing = means.drawing if draws.started is None else StartedDrawing(means.drawing, draws.started)
        with torch.inference_mode():
            sampled = means.sample(
                draws.logits, draws.rows, head_ranges=means.head_ranges, exchange=means.exchange, drawing=drawing
            )
            self._take(draws, sampled.tokens)
        return StepOutput(
            sampled=list(map(SampledToken, draws.slots, sampled.tokens)),
            logprobs=[logprobs for logprobs in sampled.logprobs if logprobs is not None],
            prompt_logprobs=self._prompts,
        )

    def _take(self, draws: _PendingDraws, tokens: Sequence[int]) -> None:
        """The tokens are known: to the slots, and to the step that was begun with guesses of them."""
        slots, trust = self._means.cache.slots, self._means.trust
        trust.count_step()
        if draws.expected is None:
            slots.append_tokens(self._filled.draw_slots, tokens)
            return
        slots.settle_tokens(draws.expected, tokens)
        if self._follower is None or draws.guesses is None:
            return
        guessed = draws.by_guess(tokens)
        if draws.guesses.copy.wait().tolist() == guessed:
            trust.right()
        else:
            trust.wrong()
            self._follower._compute_anew(guessed)

    def _compute_anew(self, guessed: Sequence[int]) -> None:
        """With tokens that are right, in the guesses' order; see the module."""
        means, draws = self._means, self._draws
        assert means.inputs is not None
        means.inputs.correct(self._num_decode, guessed)
        states = self._pass()
        if draws is not None:
            draws.logits = states.logits_of(means.decoder, len(draws.slots))
            draws.started = self._start_draws(draws.rows, draws.logits)
        means.times.remade()


def _sampling_rows(
    plan: ranks_pb2.StepPlan, draw_slots: Sequence[int], cache: ServingCache, masks: MaskSource
) -> list[SamplingRow]:
    """How each token is drawn. Waits for the step's masks if it has any."""
    mask_of = dict(zip(plan.masked_slots, _masks_of(plan, masks), strict=True)) if plan.masked_slots else {}
    return [cache.slots.sampling(slot).draw(mask_of.get(slot)) for slot in draw_slots]


def _masks_of(plan: ranks_pb2.StepPlan, masks: MaskSource) -> Sequence[bytes]:
    given = masks()
    if len(given) != len(plan.masked_slots):
        raise ProtocolError(
            f"step plan {plan.step_id}: {len(given)} masks came for {len(plan.masked_slots)} masked_slots"
        )
    return given


def _prompt_span(prompt: PromptRows, hidden: torch.Tensor, means: StepMeans) -> ranks_pb2.PromptSpanLogprobs:
    """Log-probabilities of the prompt's tokens behind the rows, a bounded number of rows at a time."""
    positions: list[logprobs_pb2.TokenLogprobs] = []
    for begin in range(0, len(prompt.token_ids), PROMPT_LOGIT_ROWS):
        token_ids = prompt.token_ids[begin : begin + PROMPT_LOGIT_ROWS]
        first = prompt.first_row + begin
        logits = means.decoder.logits(hidden[first : first + len(token_ids)]).to(HOST)
        positions += prompt_logprobs(
            logits, token_ids, prompt.num_top, head_ranges=means.head_ranges, exchange=means.exchange
        )
    return ranks_pb2.PromptSpanLogprobs(slot=prompt.slot, begin=prompt.begin, positions=positions)
