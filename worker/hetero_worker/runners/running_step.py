"""RunningStep: a step from its plan to its tokens, and the steps that may begin before the host knows these.

A step is computed when the device has been given all of it: the inputs, the forward pass and the draws. It is finished
when the host knows the tokens. On a GPU rank alone the tokens exist on the device before that, so the next step may
begin with them there, and the device does not wait for the host between the two. The host learns the tokens a step
later, through a copy to pinned memory. This is what vLLM calls asynchronous scheduling.

A plan may follow a running step if only the tokens are missing on the host: it computes something and is no command.
Its decode rows take the tokens on the device; penalties count them there. Masks follow from the tokens through the
gateway, so a plan with masked slots waits. So does one with proposals, which follow the tokens, and what comes behind
it: how many tokens a slot gets is known with the draws. So do log-probabilities of the step's draws, and those and
hidden states of the plan's prompts, which would make the host wait for the device in the middle. A slot may be released
or bound again meanwhile: its token is reported and not appended.

Ranks of a group finish each step first. Their exchange crosses the host and orders their rounds: sums of a step would
mix with the rounds of the draws before. Ranks that compute experts on a device do so too, for the host waits for the
device in every such layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import torch

from hetero_api.rank_memory import PROMPT_LOGIT_ROWS
from hetero_api.sharding import UnitRange
from hetero_api.v1 import logprobs_pb2, ranks_pb2
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.errors import ProtocolError
from hetero_worker.layers.sampler import SampledRows, SampleTokens, prompt_logprobs, start_draws
from hetero_worker.memory.streams import HOST, to_device
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest, MaskSource, SampledToken, StepOutput
from hetero_worker.runners.draft import DraftModel
from hetero_worker.runners.forward import ForwardStates
from hetero_worker.runners.input_batch import (
    NO_PROPOSAL,
    InputBatch,
    PromptRows,
    SpanRows,
    proposals_of,
    proposed_tokens,
)
from hetero_worker.runners.model_state import ServingCache
from hetero_worker.runners.plan_check import num_decode_rows
from hetero_worker.runners.prediction_head import PredictionHead, StatePlace, TokenStates
from hetero_worker.runners.slots import ExpectedTokens, draw_of, pending_token
from hetero_worker.runners.step_parts import DeviceTokenInputs
from hetero_worker.runners.step_times import StepTimes
from hetero_worker.sampling.base import ShardSampler, StartedDraws, UnknownTokens
from hetero_worker.sampling.request import SamplingRow


@dataclass(frozen=True, slots=True)
class StepContext:
    """Everything that computes and draws a step."""

    decoder: Decoder
    cache: ServingCache
    exchange: Exchange
    head_ranges: Sequence[UnitRange]
    sampler: ShardSampler
    sample: SampleTokens
    times: StepTimes
    inputs: DeviceTokenInputs | None
    """The cache's inputs, where a step may begin before the one before is finished."""
    draft: DraftModel | None = None
    """The rank's part of it; None: it takes no part in drafting."""
    tells_states: bool = False
    """Whether the draft model is a prediction head, which needs the states of tokens."""


def synchronous_because(request: LoadRequest) -> str:
    """Return why a GPU rank with this request finishes each step before the next; empty if it does not."""
    if not request.async_steps:
        return "turned off"
    if request.shard_plan.world_size > 1:
        return "ranks of a group meet between steps"
    return ""


class FinishedStep:
    """StepInFlight of a plan that is done as soon as it is begun."""

    can_be_followed = False
    is_done = True

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def may_be_followed_by(self, plan: ranks_pb2.StepPlan) -> bool:  # noqa: ARG002
        """Return False: there is nothing to wait for."""
        return False

    def finish(self) -> StepOutput:
        """Return the plan's output."""
        return self._output


@dataclass(slots=True)
class _Draws:
    """A step's draws in flight."""

    slots: list[int]
    rows: list[SamplingRow]
    logits: torch.Tensor
    started: StartedDraws | None
    """None on a rank without vocabulary rows."""
    expected: ExpectedTokens | None = None
    """Set once the slots have gone on without the tokens."""

    @property
    def device_tokens(self) -> torch.Tensor | None:
        """The tokens on the device, int64 [draws]; None where only the host decides them."""
        return None if self.started is None else self.started.token_ids


class RunningStep:
    """StepInFlight of a plan that computes; `fill`, then `compute`, begin it."""

    def __init__(self, plan: ranks_pb2.StepPlan, context: StepContext, *, on_finished: Callable[[], None]) -> None:
        """Create a step; `finish` calls `on_finished` at its end."""
        self._plan = plan
        self._context = context
        self._on_finished = on_finished
        self._num_decode = num_decode_rows(plan)
        self._batch: InputBatch | None = None
        self._draws: _Draws | None = None
        self._prompts: list[ranks_pb2.PromptSpanLogprobs] = []
        self._pooled: list[ranks_pb2.PooledSpan] = []
        self._states: TokenStates | None = None
        self._busy_s = 0.0

    # --- beginning --------------------------------------------------------------------------------------

    def fill(self, before: RunningStep | None) -> None:
        """Give the device the inputs, with tokens of the step `before`, if that is running, from the device itself."""
        cache = self._context.cache
        self._batch = cache.inputs.fill(self._plan, cache.slots)
        if before is not None:
            before._put_tokens(self._num_decode)
            self._context.times.follow(before._last_busy_s())

    def compute(self, masks: MaskSource, before: RunningStep | None) -> None:
        """Give the device the forward pass and the draws. Wait for the step's masks if it has any."""
        context, batch = self._context, self._filled
        with torch.inference_mode():
            states = self._pass()
            self._prompts = [_prompt_span(prompt, states.hidden, context) for prompt in batch.prompts]
            self._pooled = _pooled_spans(batch.pooled, states.hidden, context)
            self._states = _token_states(self._plan, batch, states.hidden, context)
            draw_slots = batch.draw_slots.tolist()
            logits = states.logits_of(context.decoder, len(draw_slots)) if draw_slots else None
            self._advance()
            if logits is not None:
                rows = _sampling_rows(self._plan, draw_slots, context.cache, masks)
                unknown = None if before is None else before._unknown_tokens(draw_slots, rows)
                started = start_draws(
                    logits,
                    rows,
                    head_ranges=context.head_ranges,
                    exchange=context.exchange,
                    sampler=context.sampler,
                    unknown=unknown,
                )
                self._draws = _Draws(draw_slots, rows, logits, started)
        self._busy_s = context.times.now()

    @property
    def _filled(self) -> InputBatch:
        assert self._batch is not None, "fill comes first"
        return self._batch

    def _pass(self) -> ForwardStates:
        context = self._context
        cache = context.cache
        return cache.forward.run(context.decoder, self._filled, caches=cache.layers, exchange=context.exchange)

    def _advance(self) -> None:
        """Take the step's tokens to be in the cache from now on."""
        cache = self._context.cache
        cache.inputs.advance_decoding(self._num_decode, cache.slots)
        for span in self._plan.spans:
            cache.slots.counts.num_computed[span.slot] += span.num_tokens

    # --- the step that follows before the end -----------------------------------------------------------

    @property
    def can_be_followed(self) -> bool:
        """True if some plan may begin before this step is finished."""
        draws = self._draws
        if self._context.inputs is None or draws is None or draws.device_tokens is None:
            return False
        if self._plan.proposals or self._plan.draft_slots or self._states is not None:
            return False
        return all(row.num_logprobs is None for row in draws.rows)

    def may_be_followed_by(self, plan: ranks_pb2.StepPlan) -> bool:
        """Return whether the next plan may begin before this step is finished."""
        draws = self._draws
        if draws is None or not self.can_be_followed or plan.HasField("command"):
            return False
        if plan.masked_slots or plan.proposals or not (plan.decode_slots or plan.spans):
            return False
        drawing = set(draws.slots).difference(plan.released_slots)
        return not any(span.slot in drawing for span in plan.spans) and not self._reports_spans(plan)

    def _reports_spans(self, plan: ranks_pb2.StepPlan) -> bool:
        slots = self._context.cache.slots
        samplings = [new.sampling for new in plan.new_sequences]
        return any(each.HasField("num_prompt_logprobs") or each.pooling for each in samplings) or any(
            slots.reports_spans(span.slot) for span in plan.spans
        )

    def expect_tokens(self) -> None:
        """Let the slots go on as if the tokens were known. Idempotent."""
        draws = self._draws
        if draws is not None and draws.expected is None:
            pending = [pending_token(draw) for draw in range(len(draws.slots))]
            draws.expected = self._context.cache.slots.expect_tokens(draws.slots, pending)

    def _put_tokens(self, num_decode: int) -> None:
        """Put this step's tokens into the batch that was filled last, of so many decode rows."""
        inputs = self._context.inputs
        assert inputs is not None, "a step that may be followed has such inputs"
        with torch.inference_mode():
            inputs.put_tokens(num_decode, self._device_tokens())

    def _unknown_tokens(self, draw_slots: Sequence[int], rows: Sequence[SamplingRow]) -> UnknownTokens | None:
        """Return this step's tokens that penalties of the next step's draws lack."""
        last_tokens = self._context.cache.slots.last_tokens
        draws = {
            i: draw_of(int(last_tokens[slot]))
            for i, (slot, row) in enumerate(zip(draw_slots, rows, strict=True))
            if row.edits is not None and row.edits.penalties is not None and last_tokens[slot] < 0
        }
        if not draws:
            return None
        ids = self._device_tokens()
        return UnknownTokens(
            list(draws), ids.index_select(0, to_device(torch.tensor(list(draws.values())), ids.device))
        )

    def _device_tokens(self) -> torch.Tensor:
        assert self._draws is not None, "a step that may be followed draws"
        assert self._draws.device_tokens is not None, "a step that may be followed draws on the device"
        return self._draws.device_tokens

    @property
    def is_done(self) -> bool:
        """True if `finish` would not wait for the device."""
        draws = self._draws
        if draws is None or draws.started is None or draws.started.is_here:
            return True
        self._busy_s = self._context.times.now()
        return False

    def _last_busy_s(self) -> float | None:
        """Return when the device was last seen at this step; None: it is now."""
        return self._busy_s if self.is_done else None

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self) -> StepOutput:
        """Wait for the tokens and return the plan's output; raises as StepInFlight.finish."""
        try:
            return self._output()
        finally:
            self._on_finished()

    def _output(self) -> StepOutput:
        draws, context = self._draws, self._context
        if draws is None:
            return StepOutput(prompt_logprobs=self._prompts, pooled=self._pooled, drafts=self._drafts())
        with torch.inference_mode():
            sampled = context.sample(
                draws.logits,
                draws.rows,
                head_ranges=context.head_ranges,
                exchange=context.exchange,
                sampler=context.sampler,
                started=draws.started,
            )
        slots = context.cache.slots
        if self._plan.proposals:
            output = self._accept(draws, sampled)
            return replace(output, drafts=self._drafts())
        if draws.expected is None:
            slots.append_tokens(self._filled.draw_slots, sampled.tokens)
        else:
            slots.settle_tokens(draws.expected, sampled.tokens)
        return StepOutput(
            sampled=list(map(SampledToken, draws.slots, sampled.tokens)),
            logprobs=[logprobs for logprobs in sampled.logprobs if logprobs is not None],
            prompt_logprobs=self._prompts,
            pooled=self._pooled,
            drafts=self._drafts(),
        )

    def _drafts(self) -> Sequence[ranks_pb2.Proposal]:
        """Let the draft model propose what follows the step's tokens."""
        plan, draft, slots = self._plan, self._context.draft, self._context.cache.slots
        if isinstance(draft, PredictionHead) and self._states is not None:
            draft.read(slots, self._states)
        if draft is None or not plan.draft_slots:
            return ()
        return draft.propose(slots, plan.draft_slots, plan.num_drafts)

    def _accept(self, draws: _Draws, sampled: SampledRows) -> StepOutput:
        """Give each slot its draws up to the first that differs from what was proposed in its place."""
        proposals = proposals_of(self._plan)
        kept: list[int] = []
        for slot, indices in groupby(range(len(draws.slots)), draws.slots.__getitem__):
            own, proposal = list(indices), proposals.get(slot, NO_PROPOSAL)
            tokens = [sampled.tokens[i] for i in own]
            number = num_accepted(tokens, proposal.token_ids) + 1
            self._context.cache.slots.append_run(slot, tokens[:number])
            if number <= len(proposal.snapshots):
                with torch.inference_mode():
                    self._context.cache.go_back(slot, proposal.snapshots[number - 1])
            kept += own[:number]
        return StepOutput(
            sampled=[SampledToken(draws.slots[i], sampled.tokens[i]) for i in kept],
            logprobs=[logprobs for i in kept if (logprobs := sampled.logprobs[i]) is not None],
            prompt_logprobs=self._prompts,
            pooled=self._pooled,
        )


def num_accepted(drawn: Sequence[int], proposed: Sequence[int]) -> int:
    """Return how many leading tokens of a proposal equal the draws in their places."""
    return next((i for i, token in enumerate(proposed) if drawn[i] != token), len(proposed))


def _sampling_rows(
    plan: ranks_pb2.StepPlan, draw_slots: Sequence[int], cache: ServingCache, masks: MaskSource
) -> list[SamplingRow]:
    """Return how each token is drawn. Wait for the step's masks if it has any."""
    if not (plan.masked_slots or plan.proposals):
        return [cache.slots.sampling(slot).draw() for slot in draw_slots]
    proposed = proposed_tokens(plan)
    masks_of = _masks_of(plan, masks, proposed) if plan.masked_slots else {}
    rows: list[SamplingRow] = []
    for slot in dict.fromkeys(draw_slots):
        sampling, ahead, own = cache.slots.sampling(slot), proposed.get(slot, ()), masks_of.get(slot)
        rows += [
            sampling.draw(None if own is None else own[number], ahead=ahead[:number])
            for number in range(1 + len(ahead))
        ]
    return rows


def _masks_of(
    plan: ranks_pb2.StepPlan, masks: MaskSource, proposed: Mapping[int, Sequence[int]]
) -> dict[int, Sequence[bytes]]:
    """Return the masks of each masked slot's draws."""
    given = masks()
    ends = list(accumulate((1 + len(proposed.get(slot, ())) for slot in plan.masked_slots), initial=0))
    if len(given) != ends[-1]:
        raise ProtocolError(f"step plan {plan.step_id}: {len(given)} masks came for {ends[-1]} draws of masked_slots")
    spans = zip(plan.masked_slots, pairwise(ends), strict=True)
    return {slot: given[begin:end] for slot, (begin, end) in spans}


def _prompt_span(prompt: PromptRows, hidden: torch.Tensor, context: StepContext) -> ranks_pb2.PromptSpanLogprobs:
    """Return log-probabilities of the prompt's tokens behind the rows, computed a bounded number of rows at a time."""
    positions: list[logprobs_pb2.TokenLogprobs] = []
    for begin in range(0, len(prompt.token_ids), PROMPT_LOGIT_ROWS):
        token_ids = prompt.token_ids[begin : begin + PROMPT_LOGIT_ROWS]
        first = prompt.first_row + begin
        logits = context.decoder.logits(hidden[first : first + len(token_ids)]).to(HOST)
        positions += prompt_logprobs(
            logits, token_ids, prompt.num_top, head_ranges=context.head_ranges, exchange=context.exchange
        )
    return ranks_pb2.PromptSpanLogprobs(slot=prompt.slot, begin=prompt.begin, positions=positions)


def _pooled_spans(pooled: Sequence[SpanRows], hidden: torch.Tensor, context: StepContext) -> list[ranks_pb2.PooledSpan]:
    """Return the sums of the rows' hidden states behind the last norm, on rank 0; on other ranks they may be zero.

    The first rank with a part of the output head has the hidden states; if that is another, it sends rank 0 the sums.
    """
    if not pooled:
        return []
    exchange, owner = context.exchange, _first_of_head(context)
    sums = torch.zeros(len(pooled), hidden.shape[1], dtype=torch.float32)
    if exchange.rank == owner:
        for index, rows in enumerate(pooled):
            states = context.decoder.normed(hidden[rows.first_row : rows.first_row + rows.num_rows])
            sums[index] = states.sum(0, dtype=torch.float32).to(HOST)
    if owner != 0:
        exchange.broadcast(sums, owner)
    return [
        ranks_pb2.PooledSpan(slot=rows.slot, num_tokens=rows.num_rows, sums=each)
        for rows, each in zip(pooled, sums.tolist(), strict=True)
    ]


def _token_states(
    plan: ranks_pb2.StepPlan, batch: InputBatch, hidden: torch.Tensor, context: StepContext
) -> TokenStates | None:
    """Return states behind the last norm for rank 0's prediction head: of spans, and of decodes to draft behind.

    As with `_pooled_spans`, another rank may have to send them. None on other ranks, and where nobody needs them.
    """
    if not context.tells_states or not (batch.told or plan.draft_slots):
        return None
    exchange, owner = context.exchange, _first_of_head(context)
    rows = hidden[: batch.told[-1].first_row + batch.told[-1].num_rows if batch.told else len(batch.draw_slots)]
    if exchange.rank == owner:
        rows = context.decoder.normed(rows)
    if owner != 0:
        there = rows.to(HOST).contiguous()
        exchange.broadcast(there, owner)
        rows = to_device(there, rows.device)
    if exchange.rank != 0:
        return None
    computed = context.cache.slots.counts.num_computed
    proposed, decodes, first = proposed_tokens(plan), dict[int, StatePlace](), 0
    for slot in plan.decode_slots:
        decodes[slot] = StatePlace(int(computed[slot]), first, 1 + len(proposed.get(slot, ())))
        first += decodes[slot].num_rows
    spans = {span.slot: StatePlace(int(computed[span.slot]), span.first_row, span.num_rows) for span in batch.told}
    return TokenStates(rows, decodes, spans)


def _first_of_head(context: StepContext) -> int:
    """Return the first rank with a part of the output head."""
    return next(rank for rank, rows in enumerate(context.head_ranges) if rows.size)
