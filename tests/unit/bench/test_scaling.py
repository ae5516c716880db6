"""Cost as work grows: what is asked at each point, and curves from runs."""

from __future__ import annotations

import pytest

from bench.comparison import Comparison, Taken
from bench.contenders import Measured
from bench.report import Width
from bench.scaling import DECODE, PREFILL, SEQUENCES, curves, points, table, tokens_per_s
from bench.turns import Run

pytestmark = pytest.mark.unit

PROSE = range(256)


def test_batches_are_of_different_prompts_and_contexts_end_with_new_tokens() -> None:
    found = points(PROSE, [1, 4], [64, 256])
    assert list(found) == ["batch 1", "batch 4", "context 64", "context 256"]
    batch = found["batch 4"].workload
    assert len(set(batch.prompts)) == 4
    assert {len(prompt) for prompt in batch.prompts} == {16}
    for length in (64, 256):
        context = found[f"context {length}"].workload
        assert context.prompt_tokens + context.output_tokens == length


def test_speeds_are_read_from_a_run_by_panel() -> None:
    point = points(PROSE, [2], [64])
    run = Measured(elapsed_s=3.0, first_token_s=1.0, output_tokens=128)
    assert tokens_per_s(SEQUENCES, point["batch 2"].workload, run) == 128 / 3
    assert tokens_per_s(PREFILL, point["context 64"].workload, run) == 32
    assert tokens_per_s(DECODE, point["context 64"].workload, run) == 31 / 2


def test_curves_are_medians_and_panels_without_points_are_left_out() -> None:
    where = points(PROSE, [1, 2], [])
    runs = {
        name: [Run(Measured(elapsed_s, 0.5, point.workload.output_tokens), 0.0, 1, False) for elapsed_s in (1, 2, 4)]
        for name, point in where.items()
    }
    comparison = Comparison([{"ours": Taken(Width(16, "float32"), {}, 1.0, 1.0, 1, 1, runs)}])
    (panel,) = curves(comparison, where).items()
    assert panel[0] == SEQUENCES
    assert panel[1][0].points == [(1, 32.0), (2, 64.0)]
    assert table(dict([panel])).splitlines()[1].split() == ["ours", "32.0", "64.0"]
