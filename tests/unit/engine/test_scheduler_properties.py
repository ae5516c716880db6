"""Whatever comes and goes, every completion gets the tokens it would get alone, and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.unit.engine.engine_setup import Bench, engine_config, generation
from tests.unit.engine.scheduler_machine import SMALL_VOCAB, SchedulerMachine, common_text

pytestmark = pytest.mark.unit

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=40)


def test_machine_meets_preemptions_hits_and_chunks() -> None:
    """The setting above does reach the cases it is for: a plain run of it counts each."""
    bench = Bench(
        engine_config(block_size=3, max_num_batched_tokens=5, max_num_seqs=3, vocab_size=SMALL_VOCAB), num_blocks=9
    )
    for index in range(12):
        bench.add(generation(f"r{index}", common_text(8 + index % 3), max_tokens=9))
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.steps > 12
