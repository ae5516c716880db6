"""A plan in the making, and how a completion is told to the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.residents import computes_prompt_logprobs
from hetero_gateway.engine.step import DecodeView, GrownEntry, ScheduledStep, SpanEntry


@dataclass(slots=True)
class PlanDraft:
    """What the next plan will hold, in columns as the plan has them."""

    new_sequences: list[ranks_pb2.NewSequence] = field(default_factory=list)
    spans: list[SpanEntry] = field(default_factory=list)
    grown: list[GrownEntry] = field(default_factory=list)
    block_slots: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def add_block(self, completion: Completion, block_id: int) -> None:
        """Append one block to the completion's block table."""
        self.block_slots.append(completion.slot)
        self.block_ids.append(block_id)

    def add_blocks(self, completion: Completion, block_ids: list[int]) -> None:
        """Append blocks to it, in order."""
        self.block_slots.extend([completion.slot] * len(block_ids))
        self.block_ids.extend(block_ids)

    def add_span(self, completion: Completion, *, num_tokens: int) -> SpanEntry:
        """Compute the completion's next `num_tokens` known tokens, and sample behind the last known one."""
        begin = completion.num_scheduled
        end = begin + num_tokens
        sample = end == completion.num_tokens
        span = SpanEntry(completion, completion.slot, completion.residency, begin, end, sample)
        completion.num_scheduled = end
        self.spans.append(span)
        return span

    def step(
        self, *, decodes: DecodeView, last_draws: tuple[Completion, ...], released_slots: list[int]
    ) -> ScheduledStep:
        """Return the complete step. Its plan gets an id when it is sent."""
        sampling = [span.completion for span in self.spans if span.sample]
        masked = (*decodes.masked, *(completion for completion in sampling if completion.is_masked))
        plan = ranks_pb2.StepPlan(
            released_slots=released_slots,
            new_sequences=self.new_sequences,
            decode_slots=decodes.slots,
            spans=[_scheduled_span(span) for span in self.spans],
            block_slots=self.block_slots,
            block_ids=self.block_ids,
            masked_slots=[completion.slot for completion in masked],
        )
        return ScheduledStep(
            plan=plan,
            decodes=decodes,
            spans=tuple(self.spans),
            grown=tuple(self.grown),
            last_draws=last_draws,
            masked=masked,
        )


def new_sequence(completion: Completion, prefix: list[int]) -> ranks_pb2.NewSequence:
    """Binds a completion that has just started behind the blocks `prefix`."""
    return ranks_pb2.NewSequence(
        slot=completion.slot,
        token_ids=completion.token_ids,
        num_computed_tokens=completion.num_scheduled,
        block_ids=prefix,
        sampling=_sampling(completion),
        num_prompt_tokens=completion.num_prompt_tokens,
    )


def _scheduled_span(span: SpanEntry) -> ranks_pb2.ScheduledSpan:
    return ranks_pb2.ScheduledSpan(slot=span.slot, num_tokens=span.end - span.begin, sample=span.sample)


def _sampling(completion: Completion) -> ranks_pb2.Sampling:
    asked = completion.request.asked.sampling
    return ranks_pb2.Sampling(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        seed=completion.seed,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        bias_token_ids=[token_id for token_id, _ in asked.logit_bias],
        biases=[bias for _, bias in asked.logit_bias],
        min_tokens=asked.min_tokens,
        end_token_ids=sorted(completion.end_token_ids) if asked.min_tokens else [],
        num_logprobs=asked.logprobs,
        num_prompt_logprobs=asked.prompt_logprobs if computes_prompt_logprobs(completion) else None,
    )
