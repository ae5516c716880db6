"""A runner on host cores that decodes in this process, without a gateway: what benchmarks of steps have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hetero_api.model_config import ModelConfig
from hetero_api.spec import PlacementShares
from hetero_api.v1 import ranks_pb2
from hetero_placement.shard_plans import deal_within_layers
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.runners.base import LoadRequest, StepOutput
from hetero_worker.runners.plan_runner import PlanRunner

BLOCK_SIZE: Final = 16
MEMORY_BYTES: Final = 8 << 30


class DecodingRank:
    """A whole model on all of this process's cores."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        *,
        dtype: str,
        most_rows: int,
        context: int,
        steps: int,
        **options: Any,
    ) -> None:
        """`context`: tokens of each sequence before its `steps`. `options`: of the LoadRequest."""
        self._blocks = -(-(context + steps + 1) // BLOCK_SIZE)
        self._context = context
        self._runner = PlanRunner(cpu_backend())
        self._runner.attach(LocalExchange())
        self.report = self._runner.load(
            LoadRequest(
                directory=directory,
                config=config,
                dtype=dtype,
                shard_plan=deal_within_layers(config, cores=[len(os.sched_getaffinity(0))], shares=PlacementShares()),
                rank=0,
                max_model_len=self._blocks * BLOCK_SIZE,
                max_num_batched_tokens=max(512, most_rows),
                max_num_seqs=most_rows,
                memory_bytes=MEMORY_BYTES,
                cache_size_is_given=True,
                **options,
            )
        )
        self._runner.allocate(1 + most_rows * self._blocks, BLOCK_SIZE)
        self._next_step = 1

    def fill(self, rows: int, adapter_of: Callable[[int], int] = lambda _slot: 0) -> None:
        """Read a prompt in each of so many slots. `adapter_of`: number of a slot's adapter."""
        for slot in range(rows):
            self.execute(self._prompt(slot, adapter_of(slot)))

    def decode(self, rows: int, together: int) -> float:
        """Decode as many steps as plans come together; return the seconds of one."""
        plans = [self._numbered(ranks_pb2.StepPlan(decode_slots=range(rows))) for _ in range(together)]
        begin_s = time.perf_counter()
        for _ in self._runner.execute_many(plans, lambda: None):
            pass
        return (time.perf_counter() - begin_s) / together

    def release(self, rows: int) -> None:
        """Free the slots."""
        self.execute(ranks_pb2.StepPlan(released_slots=range(rows)))

    def execute(self, plan: ranks_pb2.StepPlan) -> StepOutput:
        """Work a plan off."""
        return self._runner.execute(self._numbered(plan))

    def _prompt(self, slot: int, adapter: int) -> ranks_pb2.StepPlan:
        token_ids = [5 + (7 * slot + 13 * i) % 4000 for i in range(self._context)]
        first = 1 + slot * self._blocks
        new = ranks_pb2.NewSequence(
            slot=slot,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            block_ids=range(first, first + self._blocks),
            sampling=ranks_pb2.Sampling(temperature=0.0, top_p=1.0),
            adapter=adapter,
        )
        span = ranks_pb2.ScheduledSpan(slot=slot, num_tokens=len(token_ids), sample=True)
        return ranks_pb2.StepPlan(new_sequences=[new], spans=[span])

    def _numbered(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepPlan:
        plan.step_id = self._next_step
        self._next_step += 1
        return plan
