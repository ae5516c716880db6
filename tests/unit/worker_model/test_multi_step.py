"""Runs of steps that draw by themselves are, to the last bit, what their steps are one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.sharding import ShardPlan, UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.routes import routes_of
from hetero_worker.errors import ExchangeAborted, ProtocolError
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.native.team import NativeTeam
from hetero_worker.runners import running_step
from hetero_worker.runners.base import SampledToken, StepOutput
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.runners.recorded import multi_step
from hetero_worker.runners.recorded import sampling as recorded_sampling
from hetero_worker.runners.recorded.sampling import MAX_STEPS
from tests.support.rank_group import GREEDY, PlanBuilder, RankGroup, Shares
from tests.support.shm_threads import exchanges
from tests.support.step_scripts import Release, Script, Start, Steps, one_by_one, plans_of, serve, slots_of, together
from tests.support.thread_exchange import run_ranks
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

ONE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
TWO = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),))
THREE = Shares(kv_heads=((4, 2, 2),), mlp_columns=((17, 16, 17),), vocab_rows=(64, 0, 136), experts=((1, 2, 3),))
STAGES = Shares(
    kv_heads=((8, 0), (0, 8)), mlp_columns=((50, 0), (0, 50)), vocab_rows=(192, 8), experts=((6, 0), (0, 6))
)
HELPED = Shares(kv_heads=((8, 0),), mlp_columns=((20, 30),), vocab_rows=(64, 136), experts=((2, 4),))
ELSEWHERE = Shares(kv_heads=((8, 0),), mlp_columns=((20, 30),), vocab_rows=(0, 200), experts=((2, 4),))
LAYOUTS = {"one": ONE, "two": TWO, "three": THREE, "stages": STAGES, "helped": HELPED, "elsewhere": ELSEWHERE}
SAMPLED = ranks_pb2.Sampling(temperature=0.8, top_p=1.0, seed=5)
HOT = ranks_pb2.Sampling(temperature=3.0, top_p=1.0, seed=2**64 - 1)
FILTERED = ranks_pb2.Sampling(temperature=0.8, top_p=0.7, seed=5)
FEW = ranks_pb2.Sampling(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, seed=2**63)
LATE_DRAWS = ranks_pb2.Sampling(temperature=1.0, top_p=1.0, seed=6, end_token_ids=[3, 14], min_tokens=7)
PENALISED = ranks_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.7)
LATE_END = ranks_pb2.Sampling(temperature=0.0, top_p=1.0, end_token_ids=[3, 14], min_tokens=7)
TELLING = ranks_pb2.Sampling(temperature=0.0, top_p=1.0, num_logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


BLOCKS_OF_FOUR = (Start(0, [7, 150, 3]), Start(1, [1, 2, 3, 4, 5, 6]), Start(2, [9]))
SCRIPTS: dict[str, Script] = {
    "one row over blocks": (Start(0, [7, 150, 3]), Steps(25, [0])),
    "rows of several lengths, in another order": (*BLOCKS_OF_FOUR, Steps(9, [2, 0, 1]), Steps(7, [1, 0, 2])),
    "spans, and sequences that come and go": (
        *BLOCKS_OF_FOUR, Steps(6, [0, 1, 2]), Start(3, [8, 7, 6, 5, 4, 3, 2]), Steps(8, [3, 1, 0, 2]), Release(1),
        Steps(5, [0, 2, 3]), Start(1, [5]), Steps(6, [0, 1, 2, 3]),
    ),
    "other draws beside and behind": (
        *BLOCKS_OF_FOUR, Steps(6, [0, 1, 2]), Start(3, [4], SAMPLED), Steps(4, [0, 1, 2, 3]), Release(3),
        Steps(6, [2, 1, 0]), Start(4, [4], PENALISED), Steps(4, [0, 4]), Start(5, [6], TELLING), Steps(4, [0, 5]),
        Steps(6, [0, 1]), Start(6, [9], FILTERED), Steps(4, [6, 0, 1]),
    ),
    "draws with noise over blocks": (Start(0, [7, 150, 3], SAMPLED), Steps(25, [0])),
    "draws with noise and without": (
        Start(0, [7, 150, 3]), Start(1, [1, 2, 3, 4, 5, 6], SAMPLED), Start(2, [9], HOT), Steps(9, [2, 0, 1]),
        Steps(7, [1, 2, 0]), Release(0), Start(0, [7, 150, 3], HOT), Steps(6, [2, 0, 1]), Release(2), Steps(6, [1, 0]),
        Start(3, [5, 6], LATE_DRAWS), Steps(14, [0, 3, 1]),
    ),
    "draws with filters": (
        Start(0, [7, 150, 3], FILTERED), Start(1, [1, 2, 3, 4, 5, 6], FEW), Start(2, [9]), Steps(9, [2, 0, 1]),
        Release(2), Start(3, [5], HOT), Steps(9, [1, 3, 0]),
    ),
    "an end that is barred at first": (Start(0, [7, 150, 3], LATE_END), Start(1, [4, 4]), Steps(16, [0, 1])),
    "a prefix": (
        Start(0, [7, 150, 3, 9, 8]), Steps(3, [0]), Start(1, [7, 150, 3, 9, 11], prefix_of=0), Steps(12, [0, 1]),
    ),
}  # fmt: skip


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_group(
    directory: Path, shares: Shares, stack: ExitStack, folder: Path, *, keeps_logits: bool = False
) -> RankGroup:
    """A group over the native exchange."""

    def make(plan: ShardPlan) -> list[HostExchange]:
        folder.mkdir()
        ends = exchanges(folder, plan.world_size, routes=routes_of(plan))
        return list(stack.enter_context(ends))

    return RankGroup(
        directory, shares, make_exchanges=None if shares is ONE else make, keeps_logits=keeps_logits, num_blocks=80
    )


class Counted:
    """How often something was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.times = 0
        done = getattr(owner, name)

        def count(*arguments: object, **named: object) -> object:
            self.times += 1
            return done(*arguments, **named)

        monkeypatch.setattr(owner, name, count)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_are_what_steps_are_one_by_one(
    checkpoint: TinyCheckpoint, script: str, layout: str, stack: ExitStack, tmp_path: Path
) -> None:
    """And both what they are when a sampler is asked for every draw."""
    shares = LAYOUTS[layout]
    ranks = len(shares.vocab_rows)
    asked, alone, runs = (
        serve(
            make_group(checkpoint.directory, shares, stack, tmp_path / name, keeps_logits=name == "asked"),
            SCRIPTS[script],
            [work] * ranks,
        )
        for name, work in (("asked", one_by_one), ("alone", one_by_one), ("runs", together))
    )
    assert alone.tokens == asked.tokens
    assert runs.tokens == asked.tokens
    assert alone.slots == asked.slots
    assert runs.slots == asked.slots


@pytest.mark.parametrize("layout", ["two", "three"])
def test_ranks_need_not_agree_on_where_runs_begin_and_end(
    checkpoint: TinyCheckpoint, layout: str, stack: ExitStack, tmp_path: Path
) -> None:
    def in_threes(runner: PlanRunner, plans: list[ranks_pb2.StepPlan]) -> list[StepOutput]:
        return [output for i in range(0, len(plans), 3) for output in together(runner, plans[i : i + 3])]

    works = [together, one_by_one, in_threes][: len(LAYOUTS[layout].vocab_rows)]
    script = SCRIPTS["spans, and sequences that come and go"]
    asked = serve(
        make_group(checkpoint.directory, LAYOUTS[layout], stack, tmp_path / "a", keeps_logits=True),
        script,
        [one_by_one] * len(works),
    )
    mixed = serve(make_group(checkpoint.directory, LAYOUTS[layout], stack, tmp_path / "b"), script, works)
    assert mixed == asked


@pytest.mark.parametrize("sampling", [GREEDY, HOT, FEW], ids=["greedy", "with noise", "with filters"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_a_run_is_one_call_and_no_more(
    checkpoint: TinyCheckpoint,
    layout: str,
    sampling: ranks_pb2.Sampling,
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = make_group(checkpoint.directory, LAYOUTS[layout], stack, tmp_path / "a")
    builder = PlanBuilder(group)
    for start in BLOCKS_OF_FOUR:
        builder.start(start.slot, start.tokens, sampling=sampling)
    ranks = len(group.runners)

    def work(steps: int) -> None:
        plans = plans_of(builder, Steps(steps, [2, 0, 1]))
        run_ranks(group.exchanges, lambda rank: together(group.runners[rank], plans))

    work(4)  # prompts; recorded; agreed, and drawn operation by operation; drawn in one call
    calls = [Counted(monkeypatch, NativeTeam, name) for name in ("run", "run_one", "run_call")]
    drawn = Counted(monkeypatch, running_step.RunningStep, "finish")
    work(8)
    assert [counted.times for counted in calls] == [8 * ranks, 0, 0]
    assert not drawn.times


@pytest.mark.parametrize("layout", ["two", "three"])
def test_whole_rows_are_gathered_some_at_a_time(
    checkpoint: TinyCheckpoint, layout: str, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, shares = SCRIPTS["draws with filters"], LAYOUTS[layout]
    works = [together] * len(shares.vocab_rows)
    asked = serve(make_group(checkpoint.directory, shares, stack, tmp_path / "a"), script, works)
    monkeypatch.setattr(recorded_sampling, "WHOLE_LOGITS", 2 * VOCAB_SIZE)
    assert serve(make_group(checkpoint.directory, shares, stack, tmp_path / "b"), script, works) == asked


@pytest.mark.parametrize("layout", ["two", "stages"])
def test_where_something_else_crosses_the_host_nothing_draws_by_itself(
    checkpoint: TinyCheckpoint, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Counted(monkeypatch, multi_step.MultiStep, "outputs")
    script = SCRIPTS["one row over blocks"]
    group = RankGroup(checkpoint.directory, LAYOUTS[layout], keeps_logits=False, num_blocks=80)
    assert len(serve(group, script, [together] * 2).tokens) == 25
    assert not runs.times


@pytest.mark.parametrize("layout", ["one", "two", "helped"])
def test_a_step_of_a_model_of_experts_is_one_call(
    layout: str, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And draws what steps one by one do."""
    directory, script = save_tiny("qwen3-moe", tmp_path / "model").directory, SCRIPTS["one row over blocks"]
    works = len(LAYOUTS[layout].vocab_rows)
    asked = serve(
        make_group(directory, LAYOUTS[layout], stack, tmp_path / "a", keeps_logits=True), script, [one_by_one] * works
    )
    runs = Counted(monkeypatch, multi_step.MultiStep, "outputs")
    assert serve(make_group(directory, LAYOUTS[layout], stack, tmp_path / "b"), script, [together] * works) == asked
    assert runs.times


def test_a_model_that_torch_computes_a_part_of_does_not_draw_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It caps its logits."""
    save_tiny("gemma2", tmp_path)
    runs = Counted(monkeypatch, multi_step.MultiStep, "outputs")
    script = SCRIPTS["one row over blocks"]
    served = serve(RankGroup(tmp_path, ONE, keeps_logits=False), script, [together])
    assert not runs.times
    assert served == serve(RankGroup(tmp_path, ONE), script, [one_by_one])


def test_ids_that_float32_does_not_have_are_drawn_as_ever(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE, keeps_logits=False)
    builder, (runner,) = started(group), group.runners
    (plan,) = plans_of(builder, Steps(1, [0, 1]))
    cache = runner._model_state.cache
    assert cache is not None
    assert cache.multi_step is not None
    context = runner._context(cache, group.exchanges[0])
    batch = cache.multi_step.inputs.fill(plan, cache.slots)

    def can_draw(num_ids: int) -> bool:
        assert cache.multi_step is not None
        return cache.multi_step.forward.can_draw(
            context.decoder, batch, caches=cache.layers, exchange=context.exchange, head_ranges=[UnitRange(0, num_ids)]
        )

    assert can_draw(1 << 24)
    assert not can_draw((1 << 24) + 1)


def test_a_group_with_a_rank_that_cannot_draws_as_ever(
    checkpoint: TinyCheckpoint, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own sampler stands for whatever keeps it from that."""
    script = SCRIPTS["rows of several lengths, in another order"]
    runs = Counted(monkeypatch, multi_step.MultiStep, "outputs")
    mixed = make_group(checkpoint.directory, TWO, stack, tmp_path / "a")
    mixed.runners[1]._sample = partial(sample_tokens)
    served = serve(mixed, script, [together] * 2)
    assert not runs.times
    assert served == serve(make_group(checkpoint.directory, TWO, stack, tmp_path / "b"), script, [together] * 2)
    assert runs.times


def started(group: RankGroup) -> PlanBuilder:
    """Two sequences that have been decoded for a while."""
    builder = PlanBuilder(group)
    builder.start(0, [7, 150, 3])
    builder.start(1, [1, 2, 3, 4, 5, 6])
    plans = plans_of(builder, Steps(4, [0, 1]))
    run_ranks(group.exchanges, lambda rank: together(group.runners[rank], plans))
    return builder


def test_more_plans_than_there_is_room_for_are_several_runs(checkpoint: TinyCheckpoint) -> None:
    told = []
    for in_run in (True, False):
        group = RankGroup(checkpoint.directory, ONE, keeps_logits=False)
        outputs: list[StepOutput] = []
        _collect(group.runners[0], plans_of(started(group), Steps(2 * MAX_STEPS + 3, [0, 1])), outputs, in_run=in_run)
        told.append((outputs, slots_of(group.runners[0])))
    assert len(told[0][0]) == 2 * MAX_STEPS + 3
    assert told[0] == told[1]


def spoil_order(plan: ranks_pb2.StepPlan) -> None:
    plan.step_id += 1


def spoil_blocks(plan: ranks_pb2.StepPlan) -> None:
    plan.block_slots.append(0)
    plan.block_ids.append(10_000)


def spoil_slot(plan: ranks_pb2.StepPlan) -> None:
    plan.block_slots.append(5)
    plan.block_ids.append(7)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(spoil_order, "expected step 8"), (spoil_blocks, "a block outside"), (spoil_slot, "slot 5, which is not in use")],
)
def test_plans_before_one_that_does_not_fit_are_worked_off(
    checkpoint: TinyCheckpoint, spoil: Callable[[ranks_pb2.StepPlan], None], problem: str
) -> None:
    told: list[list[StepOutput]] = []
    slots = []
    for in_run in (True, False):
        group = RankGroup(checkpoint.directory, ONE, keeps_logits=False)
        builder, (runner,) = started(group), group.runners
        plans = plans_of(builder, Steps(6, [0, 1]))
        spoil(plans[3])
        outputs: list[StepOutput] = []
        with pytest.raises(ProtocolError, match=problem):
            _collect(runner, plans, outputs, in_run=in_run)
        told.append(outputs)
        slots.append(slots_of(runner))
    assert [len(outputs) for outputs in told] == [3, 3]
    assert told[0] == told[1]
    assert slots[0] == slots[1]


def _collect(runner: PlanRunner, plans: list[ranks_pb2.StepPlan], outputs: list[StepOutput], *, in_run: bool) -> None:
    told = runner.execute_many(plans, lambda: None) if in_run else (runner.execute(plan) for plan in plans)
    for output in told:
        outputs.append(output)


def test_a_run_that_outgrows_its_blocks_is_refused_where_it_does(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE, keeps_logits=False)
    builder, (runner,) = started(group), group.runners
    plans = plans_of(builder, Steps(8, [0, 1]))
    growing = next(i for i, plan in enumerate(plans) if plan.block_slots)
    for plan in plans:
        plan.ClearField("block_slots")
        plan.ClearField("block_ids")
    outputs: list[StepOutput] = []
    with pytest.raises(ProtocolError, match=f"step plan {plans[growing].step_id}: slot . has . blocks of 4 for"):
        _collect(runner, plans, outputs, in_run=True)
    assert len(outputs) == growing


def test_steps_before_logits_that_are_not_finite_are_told(tmp_path: Path) -> None:
    """The weights are damaged where a token is looked up that is first drawn in the middle of a run."""
    sound = tmp_path / "sound"
    save_tiny("llama", sound)
    group = RankGroup(sound, ONE, keeps_logits=False)
    builder = started(group)
    seen = known_tokens(group.runners[0])
    drawn = [output.sampled for output in together(group.runners[0], plans_of(builder, Steps(8, [0, 1])))]
    last = next(i for i, tokens in enumerate(drawn) if i >= 2 and tokens[0].token not in seen | tokens_of(drawn[:i]))
    assert last < 7
    weights = load_file(sound / "model.safetensors")
    weights["model.embed_tokens.weight"][drawn[last][0].token] = float("nan")
    save_file(weights, sound / "model.safetensors", metadata={"format": "pt"})
    for in_run in (True, False):
        damaged = RankGroup(sound, ONE, keeps_logits=False)
        plans = plans_of(started(damaged), Steps(8, [0, 1]))
        outputs: list[StepOutput] = []
        with pytest.raises(ModelError, match="not finite"):
            _collect(damaged.runners[0], plans, outputs, in_run=in_run)
        assert [output.sampled for output in outputs] == drawn[: last + 1]


def tokens_of(drawn: Sequence[Sequence[SampledToken]]) -> set[int]:
    return {sampled.token for of_step in drawn for sampled in of_step}


def known_tokens(runner: PlanRunner) -> set[int]:
    """All that are known."""
    cache = runner._model_state.cache
    assert cache is not None
    return set(cache.slots.token_ids.flatten().tolist())


def test_an_abort_ends_a_run_in_its_middle(checkpoint: TinyCheckpoint, stack: ExitStack, tmp_path: Path) -> None:
    """A peer makes three of its steps only."""
    group = make_group(checkpoint.directory, TWO, stack, tmp_path / "a")
    builder = started(group)
    plans, counted, stopped = plans_of(builder, Steps(8, [0, 1])), [], Event()

    def work(rank: int) -> str:
        runner = group.runners[rank]
        if rank == 1:
            for plan in plans[:3]:
                runner.execute(plan)
            stopped.wait(20)
            group.exchanges[1].abort()
            return "aborted"

        def count() -> None:
            counted.append(1)
            if len(counted) == 3:
                stopped.set()

        with pytest.raises(ExchangeAborted):
            list(runner.execute_many(plans, count))
        return "unwound"

    assert run_ranks(group.exchanges, work) == ["unwound", "aborted"]
    assert len(counted) == 3


def test_the_times_of_a_run_are_those_of_its_steps(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE, keeps_logits=False)
    builder, (runner,) = started(group), group.runners
    ended_s: list[float] = []
    list(runner.execute_many(plans_of(builder, Steps(6, [0, 1])), lambda: ended_s.append(runner._times.now())))
    summary = runner._times.summary()
    assert summary is not None
    assert summary.num_steps == 9
    assert min(later - earlier for earlier, later in pairwise(ended_s)) > 0


def test_a_new_epoch_begins_with_steps_like_any_other(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, ONE, keeps_logits=False)
    script = SCRIPTS["rows of several lengths, in another order"]
    first = serve(group, script, [together])
    group.start()
    assert serve(group, script, [together]) == first
