"""Costs of a step beside its layers: the output head with the draw, the way from token ids to hidden states, and
the plan.
"""

from __future__ import annotations

from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import NO_UNITS, UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_worker.layers.embedding import OutputHead, ShardedEmbedding
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.layers.rotary import RotaryTables
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.probe.layers import BLOCK_SIZE, Site, SyntheticStep, TimedWork, as_it_is
from hetero_worker.probe.sizes import UNIT
from hetero_worker.probe.timing import Point, Work
from hetero_worker.runners.input_batch import InputBuffers
from hetero_worker.runners.plan_check import PlanBounds, PlanCheck
from hetero_worker.runners.profile_run import LoopbackExchange
from hetero_worker.runners.slots import SlotTable
from hetero_worker.sampling.request import SamplingRow

_EMBEDDING_ROWS: Final = 4096
"""A few rows are looked up, wherever they lie; a whole embedding would only take time to make."""
_GREEDY: Final = SamplingRow(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)


class HeadProbe:
    """Output heads of two sizes, and the draw of tokens from what they give."""

    def __init__(self, config: ModelConfig, site: Site, *, units: int) -> None:
        self._config = config
        self._site = site
        self._norm = RmsNorm(
            "model.norm.weight",
            width=config.hidden_size,
            eps=config.rms_norm_eps,
            offset=config.norm_offset,
            ops=site.ops,
        )
        self._norm.load(site.checkpoint, dtype=site.dtype, device=site.device)
        self._heads = {count: self._head(count) for count in sorted({max(1, units // 2), units})}

    def _head(self, units: int) -> OutputHead:
        rows = UnitRange(0, min(units * UNIT, self._config.vocab_size))
        head = OutputHead(self._config, rows, embedding_rows=NO_UNITS)
        head.load(
            self._site.checkpoint, None, dtype=self._site.dtype, kernel=self._site.kernel, device=self._site.device
        )
        return head

    def works(self, step: SyntheticStep) -> list[TimedWork]:
        """Each size once: together they leave nothing of each other's weights in a cache that is not very large."""
        point = Point(ranks_pb2.MODEL_PART_HEAD, step.rows)
        return [TimedWork(point, units, self._draw(step, head)) for units, head in self._heads.items()]

    def _draw(self, step: SyntheticStep, head: OutputHead) -> Work:
        rows, ranges = [_GREEDY] * step.rows, [UnitRange(0, head.shape[0])]
        alone, sampler = LoopbackExchange(rank=0, world_size=1), self._site.sampler
        record = self._site.record if step.context else as_it_is
        logits_of = record(lambda: head(self._norm(step.hidden)))

        def work() -> None:
            sample_tokens(logits_of(), rows, head_ranges=ranges, exchange=alone, sampler=sampler)

        return work


class StepProbe:
    """Looks up what a step's layers begin with, and takes out the rows that draw."""

    def __init__(self, config: ModelConfig, site: Site, rotary: RotaryTables) -> None:
        """Make an embedding with as many rows as a step looks up."""
        self._rotary = rotary
        self._device = site.device
        self._embedding = ShardedEmbedding(config, UnitRange(0, min(config.vocab_size, _EMBEDDING_ROWS)))
        self._embedding.load(site.checkpoint, dtype=site.dtype, device=site.device)

    def work(self, step: SyntheticStep) -> Work:
        """Return the work from token ids to hidden states."""
        positions = torch.arange(step.rows, device=self._device)
        token_ids = positions % self._embedding.num_rows
        drawn = positions if step.context else positions[-1:]

        def work() -> None:
            hidden = self._embedding(token_ids)
            self._rotary.at(positions)
            hidden.index_select(0, drawn)

        return work


_FIRST_BLOCK: Final = 1


class PlanProbe:
    """Slots that each have one token to compute, so that the same plan of decodes fits again and again."""

    def __init__(self, config: ModelConfig, *, rows: int) -> None:
        length = min(config.max_position, rows * BLOCK_SIZE)
        bounds = PlanBounds(
            max_num_seqs=rows,
            max_num_batched_tokens=rows,
            max_model_len=length,
            vocab_size=config.vocab_size,
            num_blocks=_FIRST_BLOCK + rows,
            block_size=BLOCK_SIZE,
        )
        self._check = PlanCheck(bounds)
        self._slots = SlotTable(max_num_seqs=rows, max_model_len=length, block_size=BLOCK_SIZE)
        self._inputs = InputBuffers(bounds)
        self._bind(rows)

    def _bind(self, rows: int) -> None:
        greedy = ranks_pb2.Sampling(temperature=0, top_p=1)
        plan = ranks_pb2.StepPlan(
            step_id=1,
            new_sequences=[
                ranks_pb2.NewSequence(slot=slot, token_ids=[0], num_prompt_tokens=1, sampling=greedy)
                for slot in range(rows)
            ],
            block_slots=range(rows),
            block_ids=range(_FIRST_BLOCK, _FIRST_BLOCK + rows),
        )
        self._slots.apply(plan)

    def work(self, rows: int) -> Work:
        """Return the work on a plan, given as bytes, in which the first `rows` slots decode."""
        payload = ranks_pb2.StepPlan(step_id=2, decode_slots=range(rows)).SerializeToString()

        def work() -> None:
            plan = ranks_pb2.StepPlan.FromString(payload)
            self._check.run(plan, self._slots.counts)
            self._slots.apply(plan)
            self._inputs.fill(plan, self._slots)

        return work
