"""What a rank does with a plan before it computes: check it, apply it to the slots, make the step's inputs of it."""

from __future__ import annotations

from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.probe.clock import Work
from hetero_worker.probe.layers import BLOCK_SIZE
from hetero_worker.runners.input_batch import InputBuffers
from hetero_worker.runners.plan_check import PlanBounds, PlanCheck
from hetero_worker.runners.slots import SlotTable

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
        """A plan in which the first `rows` slots decode; it comes as bytes."""
        payload = ranks_pb2.StepPlan(step_id=2, decode_slots=range(rows)).SerializeToString()

        def work() -> None:
            plan = ranks_pb2.StepPlan.FromString(payload)
            self._check.run(plan, self._slots.counts)
            self._slots.apply(plan)
            self._inputs.fill(plan, self._slots)

        return work
