"""What a step costs beside its layers: the output head with the draw, and the way from token ids to hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import NO_UNITS, UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_worker.layers.embedding import OutputHead, ShardedEmbedding
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.layers.rotary import RotaryTables
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.probe.clock import Work
from hetero_worker.probe.fit import Point
from hetero_worker.probe.layers import Site, SyntheticStep, TimedWork
from hetero_worker.probe.recorded import as_it_is
from hetero_worker.probe.sizes import UNIT
from hetero_worker.runners.loopback import LoopbackExchange
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
        alone, drawing = LoopbackExchange(rank=0, world_size=1), self._site.drawing
        record = self._site.record if step.context else as_it_is
        logits_of = record(lambda: head(self._norm(step.hidden)))

        def work() -> None:
            sample_tokens(logits_of(), rows, head_ranges=ranges, exchange=alone, drawing=drawing)

        return work


@dataclass(frozen=True, slots=True)
class StepProbe:
    """Looks up what a step's layers begin with, and takes out the rows that draw."""

    embedding: ShardedEmbedding
    rotary: RotaryTables
    site: Site

    @classmethod
    def make(cls, config: ModelConfig, site: Site, rotary: RotaryTables) -> StepProbe:
        embedding = ShardedEmbedding(config, UnitRange(0, min(config.vocab_size, _EMBEDDING_ROWS)))
        embedding.load(site.checkpoint, dtype=site.dtype, device=site.device)
        return cls(embedding, rotary, site)

    def work(self, step: SyntheticStep) -> Work:
        positions = torch.arange(step.rows, device=self.site.device)
        token_ids = positions % self.embedding.num_rows
        drawn = positions if step.context else positions[-1:]

        def work() -> None:
            hidden = self.embedding(token_ids)
            self.rotary.at(positions)
            hidden.index_select(0, drawn)

        return work
