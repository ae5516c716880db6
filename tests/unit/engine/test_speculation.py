"""Streams are what they are without proposals; n-grams are found; tokens are proposed only where that pays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig, SpeculationConfig
from hetero_gateway.engine.errors import InvalidRequest, StepMismatch
from hetero_gateway.engine.request import Completion, Constraint, ConstraintKind, GenerationRequest
from hetero_gateway.engine.speculation import ngram
from hetero_gateway.engine.speculation.ngram import NGramIndex, NGramProposer, Proposal
from hetero_gateway.engine.speculation.speculator import (
    MOST_COMPLETIONS,
    RETRY_STEPS,
    Acceptance,
    DraftProposer,
    Speculator,
)
from hetero_gateway.engine.step import DecodeView, ScheduledStep
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from hetero_gateway.engine.text.constraints import ConstraintCompiler
from tests.unit.engine.core_setup import TOKENIZER, VOCAB_SIZE, Answer, Engine, engine, read, until
from tests.unit.engine.engine_setup import Bench, engine_config, generation
from tests.unit.engine.oracle import OracleProposer, fake_oracle

pytestmark = pytest.mark.unit

EOS = 0
PROPOSING = SpeculationConfig(max_tokens=6)
DRAFTING = SpeculationConfig(max_tokens=6, drafts=True)


def config(speculation: SpeculationConfig | None = None, **more: Any) -> EngineConfig:
    return engine_config(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), speculation=speculation, **more)


def told(answer: Answer) -> object:
    """What a client gets, but for times and the prefix cache's luck."""
    ends = {
        index: (end.reason, end.stop_text, end.stop_token_id, end.usage.completion_tokens)
        for index, end in answer.ends.items()
    }
    logprobs = {index: [str(each) for each in many] for index, many in answer.logprobs.items()}
    return answer.tokens, answer.texts, logprobs, ends, str(answer.error)


async def answers(
    asked: Sequence[GenerationRequest],
    settings: EngineConfig,
    proposer: NGramProposer | None = None,
    *,
    kill: bool = False,
) -> tuple[list[Answer], Engine]:
    async with engine(settings, proposer=proposer) as it:
        reading = [asyncio.create_task(read(it.core.submit(each))) for each in asked]
        if kill:
            await until(lambda: it.core.stats().generated_tokens > 8)
            it.ranks.hold()
            await until(lambda: any(step.step.proposals for step in it.ranks.in_flight))
            it.ranks.lose("a rank died")
            await until(lambda: bool(it.broken))
            it.new_group()
        return [await each for each in reading], it


def oracle_of(known: Sequence[Answer], asked: Sequence[GenerationRequest], *, rate: float) -> OracleProposer:
    by_id = {each.request_id: answer for each, answer in zip(asked, known, strict=True)}

    def answer(completion: Completion, count: int) -> Sequence[int]:
        return by_id[completion.request.request_id].tokens.get(completion.index, [])[:count]

    return OracleProposer(answer, rate=rate, vocab_size=VOCAB_SIZE)


async def compiled(kind: ConstraintKind, text: str) -> Constraint:
    compiler = ConstraintCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    return await compiler.compile(Constraint(kind, text))


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}}, "required": ["a", "b"]}'
)


async def requests() -> list[GenerationRequest]:
    form = await compiled(ConstraintKind.REGEX, "[a-d]{9}(x|yz)*")
    json = await compiled(ConstraintKind.JSON_SCHEMA, SCHEMA)
    return [
        generation("plain", [5, 6, 7], max_tokens=20, ignore_eos=True),
        generation("several", [5, 6, 8, 9, 1], max_tokens=18, n=3, seed=4, logprobs=2),
        generation("ends", [9, 9], max_tokens=30, stop_token_ids=frozenset(range(40, 50))),
        generation("form", [1, 2, 3], max_tokens=24, constraint=form, seed=3),
        generation("json", [1, 2, 3, 4], max_tokens=40, constraint=json, seed=8),
    ]


@pytest.mark.parametrize("rate", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("kill", [False, True], ids=["", "a rank dies"])
async def test_streams_are_those_without_proposals(rate: float, kill: bool) -> None:
    asked = await requests()
    expected, _ = await answers(asked, config(max_num_seqs=12))
    asked = await requests()
    found, it = await answers(
        asked, config(PROPOSING, max_num_seqs=12), oracle_of(expected, asked, rate=rate), kill=kill
    )
    assert [*map(told, found)] == [*map(told, expected)]
    stats = it.core.stats()
    assert 0 < stats.accepted_tokens <= stats.proposed_tokens
    assert 0 < stats.proposals < stats.proposed_tokens
    assert stats.generated_tokens == sum(len(tokens) for each in expected for tokens in each.tokens.values())


@pytest.mark.parametrize("kill", [False, True], ids=["", "a rank dies"])
async def test_streams_are_those_without_drafts(kill: bool) -> None:
    expected, _ = await answers(await requests(), config(max_num_seqs=12))
    found, it = await answers(await requests(), config(DRAFTING, max_num_seqs=12), kill=kill)
    assert [*map(told, found)] == [*map(told, expected)]
    stats = it.core.stats()
    assert 0 < stats.accepted_tokens < stats.proposed_tokens
    assert it.core.speculation.startswith("Draft, ")


async def test_a_stop_string_within_a_proposal_ends_the_text_and_the_count_there() -> None:
    free = generation("free", [5, 6, 7], max_tokens=30, ignore_eos=True)
    ((plain,), _) = await answers([free], config())
    for begin in range(2, 24):
        stop = TOKENIZER.decode(plain.token_ids[begin : begin + 2])
        asked = generation("stop", [5, 6, 7], max_tokens=30, ignore_eos=True, stop=(stop,) if stop else ())
        expected, _ = await answers([asked], config())
        found, it = await answers([asked], config(PROPOSING), oracle_of([plain], [asked], rate=1.0))
        assert [*map(told, found)] == [*map(told, expected)]
        assert it.core.stats().generated_tokens == found[0].finished.usage.completion_tokens


@pytest.mark.parametrize("speculation", [PROPOSING, DRAFTING], ids=["an oracle", "a draft model"])
def test_too_few_blocks_preempt_and_change_no_token(speculation: SpeculationConfig) -> None:
    settings = engine_config(block_size=3, max_num_batched_tokens=8, max_num_seqs=4, speculation=speculation)
    oracle = None if speculation.drafts else fake_oracle(rate=0.9, vocab_size=settings.vocab_size)
    bench = Bench(settings, num_blocks=11, proposer=oracle)
    plain = Bench(engine_config(block_size=3, max_num_batched_tokens=8, max_num_seqs=4), num_blocks=11)
    for each in (bench, plain):
        for index in range(8):
            each.add(generation(f"r{index}", range(5 + index % 3), max_tokens=14, seed=index))
        each.run()
    assert bench.outputs == plain.outputs
    stats = bench.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 0
    assert stats.steps < plain.scheduler.stats().steps


def test_proposals_leave_room_for_whoever_waits() -> None:
    """They take draws, tokens and blocks that nothing else wants."""
    settings = engine_config(max_num_batched_tokens=6, max_num_seqs=3, speculation=PROPOSING)
    bench = Bench(settings, num_blocks=40, proposer=fake_oracle(rate=1.0, vocab_size=settings.vocab_size))
    bench.add(generation("a", [1, 2], max_tokens=20))
    bench.step()
    bench.add(generation("b", range(30), max_tokens=3))
    while (step := bench.step()) is not None:
        assert step.num_tokens <= 6
        draws = len(step.decodes.slots) + sum(map(len, step.proposals.values())) + sum(s.sample for s in step.spans)
        assert draws <= 3
        if any(not span.sample for span in step.spans):
            assert not step.proposals
    assert bench.scheduler.stats().accepted_tokens > 0


def test_an_answer_with_tokens_that_were_not_proposed_is_refused() -> None:
    settings = engine_config(speculation=PROPOSING)
    bench = Bench(settings, num_blocks=40, proposer=fake_oracle(rate=1.0, vocab_size=settings.vocab_size))
    bench.add(generation("a", [1, 2], max_tokens=20))
    bench.step()
    step = bench.schedule()
    assert step is not None
    ((slot, proposed),) = step.proposals.items()
    sent = bench.in_flight.submit(step)
    wrong = [(proposed[0] + 1) % settings.vocab_size, 5]
    with pytest.raises(Exception, match="which was not proposed"):
        step.sampled_tokens(
            ranks_pb2.StepResult(step_id=sent.step_id, slots=[slot, slot], token_ids=wrong),
            vocab_size=settings.vocab_size,
        )


async def test_a_form_that_cannot_go_on_behind_a_proposal_ends_the_request_only_there() -> None:
    """The library gives up behind the third token: the draw before decides whether anybody gets there."""
    form = await compiled(ConstraintKind.REGEX, "[a-d]{9}")
    matcher = form.matcher()  # type: ignore[attr-defined]
    first = matcher.mask()
    token = {TOKENIZER.decode([each]): each for each in range(VOCAB_SIZE) if first[each // 8] >> each % 8 & 1}
    masks = matcher.masks([token["a"], token["b"], EOS, token["c"]])
    assert len(masks) == 3  # the end is not allowed there
    problem = InvalidRequest("sampling.regex", "became too complex")
    for path, raises in (([token["a"], token["b"]], True), ([token["a"], token["c"]], False)):
        matcher = form.matcher()  # type: ignore[attr-defined]
        matcher._dead_end = [token["a"], token["b"]], problem
        matcher.advance(path[0])
        if raises:
            with pytest.raises(InvalidRequest, match="too complex"):
                matcher.advance(path[1])
        else:
            matcher.advance(path[1])
            matcher.advance(token["a"])


# --- n-grams --------------------------------------------------------------------------------------------


def completion_of(tokens: list[int], *, num_prompt: int, salt: str = "") -> Any:
    """As much of a completion as proposers look at."""
    asked = SimpleNamespace(cache_salt=salt, prompt_token_ids=tuple(tokens[:num_prompt]))
    return _Completion(tokens, SimpleNamespace(asked=asked), num_prompt)


@dataclass(eq=False)
class _Completion:
    token_ids: list[int]
    request: Any
    num_prompt: int
    max_num_tokens: int = 10_000
    end_token_ids: frozenset[int] = frozenset()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def test_the_last_place_of_the_longest_n_gram_goes_on() -> None:
    text = [*range(10, 20), 1, 13, 14, 15, 2, 3, 9, 9, 10, 11, 12, 13, 14, 15]
    proposer = NGramProposer()
    # "13 14 15" stood last before a 2, but behind "10 11 12" before a 16.
    assert proposer.propose(completion_of(text, num_prompt=5), 4) == ([16, 17, 18, 19], 6)
    assert proposer.propose(completion_of([*text[:17], 13, 14, 15], num_prompt=5), 4) == ([2, 3, 9, 13], 3)
    assert not proposer.propose(completion_of([*text, 99], num_prompt=5), 4).token_ids
    assert not proposer.propose(completion_of([1, 2], num_prompt=1), 4).token_ids


def test_places_are_compared_up_to_the_longest_match() -> None:
    text = [*range(10, 60), 1, *range(30, 60)]
    assert NGramProposer().propose(completion_of(text, num_prompt=5), 2) == ([1, 30], ngram.LONGEST_MATCH)
    # The pair before the last places is the same; those before MOST_PLACES of them are not looked at.
    seldom = [7, 8, 9, 10, *([5, 9, 10] * ngram.MOST_PLACES), 7, 8, 9, 10]
    assert NGramProposer().propose(completion_of(seldom, num_prompt=5), 1) == ([7], 2)
    assert NGramProposer().propose(completion_of(seldom[:4] + seldom[7:], num_prompt=5), 1) == ([5], 4)


def test_what_repeats_goes_on_repeating() -> None:
    repeating = completion_of([5, 1, 2, 3, 1, 2, 3, 1, 2, 3], num_prompt=1)
    assert NGramProposer().propose(repeating, 7) == ([1, 2, 3, 1, 2, 3, 1], 6)


def test_an_index_follows_its_list_token_by_token() -> None:
    tokens, grown = [i % 7 * (i % 5) for i in range(200)], [0]
    index = NGramIndex(grown)
    for token in tokens:
        grown.append(token)
        index.take_in(100)
        whole = NGramIndex(list(grown))
        whole.take_in(10_000)
        assert index.following(grown, 5) == whole.following(grown, 5)


def test_recent_outputs_are_proposed_to_their_tenant_alone() -> None:
    proposer = NGramProposer()
    proposer.ended(completion_of([1, 2, 3, 50, 51, 52, 53, 54, 55], num_prompt=3, salt="a"))
    asking = [7, 7, 50, 51, 52]
    assert proposer.propose(completion_of(asking, num_prompt=2, salt="a"), 2) == ([53, 54], 3)
    assert not proposer.propose(completion_of(asking, num_prompt=2, salt="b"), 2).token_ids


def test_the_longer_match_counts_of_ones_own_text_and_recent_outputs() -> None:
    proposer = NGramProposer()
    proposer.ended(completion_of([1, 50, 51, 52, 53], num_prompt=1))
    assert proposer.propose(completion_of([51, 52, 60, 50, 51, 52], num_prompt=2), 1) == ([53], 3)
    assert proposer.propose(completion_of([50, 51, 52, 60, 50, 51, 52], num_prompt=2), 1) == ([60], 3)


def test_memory_and_work_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MOST_INDEXED", 100)
    monkeypatch.setattr(ngram, "MOST_AT_ONCE", 30)
    monkeypatch.setattr(ngram, "RECENT_TOKENS", 20)
    monkeypatch.setattr(ngram, "RECENT_TENANTS", 3)
    proposer = NGramProposer()
    long = completion_of([1, 2, 3, 4] * 20, num_prompt=1)
    assert [bool(proposer.propose(long, 2).token_ids) for _ in range(3)] == [False, False, True]
    for number in range(9):
        other = completion_of([number] * 30, num_prompt=1, salt=f"{number}")
        proposer.propose(other, 2)
        assert proposer.num_indexed <= 110
        for _ in range(3):
            proposer.ended(other)
    assert len(proposer._recent) == 3
    assert all(len(each.tokens) <= 40 for each in proposer._recent.values())


def test_completions_for_which_there_is_no_room_do_not_take_it_from_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "MOST_INDEXED", 150)
    taken = []
    take_in = ngram.NGramIndex.take_in

    def counted(index: ngram.NGramIndex, most: int) -> None:
        before = index.num_taken
        take_in(index, most)
        taken.append(index.num_taken - before)

    monkeypatch.setattr(ngram.NGramIndex, "take_in", counted)
    proposer = NGramProposer()
    three = [completion_of([1, 2, 3, 4] * 15, num_prompt=1) for _ in range(3)]
    for _ in range(10):
        proposed = [bool(proposer.propose(completion, 2).token_ids) for completion in three]
    assert proposed == [True, True, False]
    assert sum(taken) == 120
    proposer.ended(three[0])
    assert proposer.propose(three[2], 2).token_ids
    three[1].token_ids.extend([1] * 100)  # it has grown beyond the room
    assert not proposer.propose(three[1], 2).token_ids
    assert proposer.propose(three[2], 2).token_ids


# --- does it pay ----------------------------------------------------------------------------------------


class Timed:
    """A speculator, and ranks on which steps take the seconds that a test says."""

    def __init__(self, *, plain_s: float, row_s: float, wrong: bool = False, only_if_faster: bool = True) -> None:
        self.plain_s, self.row_s, self.wrong = plain_s, row_s, wrong
        self.completion = completion_of([1, 2, 3, 4, 5, 6, 7, 8], num_prompt=8)
        self.speculator = Speculator(SpeculationConfig(max_tokens=8, only_if_faster=only_if_faster))
        self.now = 0.0
        self.proposed: list[int] = []
        """Tokens proposed in each step."""

    def run(self, steps: int) -> float:
        """Tokens per second."""
        begin_s, begin = self.now, self.completion.num_tokens
        for _ in range(steps):
            self.step()
        num_tokens: int = self.completion.num_tokens - begin
        return num_tokens / (self.now - begin_s)

    def step(self) -> None:
        chosen = self.speculator.proposals([self.completion], most=20)
        tokens = list(chosen.get(self.completion, ()))
        self.proposed.append(len(tokens))
        seconds = self.plain_s + self.row_s * len(tokens)
        view = DecodeView([self.completion], [0], [self.completion.token_ids], [frozenset()], (), False)
        step = ScheduledStep(ranks_pb2.StepPlan(), decodes=view, proposals={0: tokens} if tokens else {})
        self.speculator.add_step(
            step, began_s=self.now, seconds=seconds, on_ranks_s=seconds, num_tokens=len(tokens) + 1
        )
        self.now += seconds
        known = self.completion.token_ids
        right = 0 if self.wrong else len(tokens)
        for _ in range(right + 1):
            known.append(known[-8] if not self.wrong or len(known) % 3 else 1000 + len(known))


def test_what_repeats_is_proposed_once_steps_were_measured() -> None:
    it = Timed(plain_s=0.02, row_s=0.001)
    speed = it.run(60)
    assert it.proposed[0] == 0
    assert max(it.proposed) >= 7
    assert speed > 3 / it.plain_s
    it.run(400)
    # Nine tokens in the time of a step and of eight rows more, in place of nine steps.
    assert it.speculator.gain == pytest.approx(9 * 0.02 / 0.028, rel=0.02)
    assert it.speculator.describe().endswith(", 6.43 times as fast as without")
    it.speculator.begin_epoch()
    assert it.speculator.gain == 0


def test_rows_that_cost_a_step_each_are_proposed_at_most_twice() -> None:
    it = Timed(plain_s=0.02, row_s=0.03)
    speed = it.run(400)
    assert speed > 0.97 / it.plain_s
    assert sum(map(bool, it.proposed)) < 12


def test_n_grams_alone_are_proposed_at_the_length_that_pays() -> None:
    it = Timed(plain_s=0.02, row_s=0.03, only_if_faster=False)
    it.run(80)
    assert set(it.proposed[-20:]) == {1}
    assert it.speculator.gain < 1
    it = Timed(plain_s=0.02, row_s=0.001, only_if_faster=False)
    it.run(60)
    assert set(it.proposed[-20:]) == {8}


def test_wrong_guesses_cost_nothing() -> None:
    it = Timed(plain_s=0.02, row_s=0.005, wrong=True)
    speed = it.run(400)
    assert speed > 0.97 / it.plain_s


def test_many_completions_are_left_alone() -> None:
    speculator = Speculator(SpeculationConfig(max_tokens=8))
    many = [completion_of([1, 2, 3, 4] * 9, num_prompt=4) for _ in range(MOST_COMPLETIONS + 1)]
    assert not speculator.proposals(many, most=100)
    assert speculator.proposals(many[:-1], most=100)


class Drafted(Timed):
    """The same with a draft model, whose tokens take `draft_s` each behind a step, and are right in turns."""

    def __init__(
        self, *, plain_s: float, row_s: float, draft_s: float, right: str, only_if_faster: bool = True
    ) -> None:
        super().__init__(plain_s=plain_s, row_s=row_s)
        self.draft_s, self.right = draft_s, right
        self.completion.max_num_tokens = 1_000_000
        self.speculator = Speculator(SpeculationConfig(max_tokens=8, only_if_faster=only_if_faster, drafts=True))

    def step(self) -> None:
        proposed = list(self.speculator.proposals([self.completion], most=20).get(self.completion, ()))
        number = self.speculator.num_drafts([self.completion], most=20)
        self.proposed.append(len(proposed))
        plan = ranks_pb2.StepPlan(draft_slots=[0] if number else [], num_drafts=number)
        view = DecodeView([self.completion], [0], [self.completion.token_ids], [frozenset()], (), False)
        step = ScheduledStep(plan, decodes=view, proposals={0: proposed} if proposed else {})
        seconds = self.plain_s + self.row_s * len(proposed) + self.draft_s * number
        known = self.completion.token_ids
        accepted = next((i for i, token in enumerate(proposed) if token != self.token(len(known) + i)), len(proposed))
        known += [self.token(len(known) + i) for i in range(accepted + 1)]
        self.speculator.add_step(step, began_s=self.now, seconds=seconds, on_ranks_s=seconds, num_tokens=accepted + 1)
        self.now += seconds
        if number:
            drafts = [self.token(len(known) + i) for i in range(number)]
            wrong = [self.right[(len(known) + i) % len(self.right)] == "-" for i in range(number)]
            drafts = [token + 1 if is_wrong else token for token, is_wrong in zip(drafts, wrong, strict=True)]
            self.speculator.take_draft(self.completion, drafts)

    @staticmethod
    def token(position: int) -> int:
        return position % 1000 * 2


def test_a_good_draft_model_gives_the_arithmetic_s_speed() -> None:
    it = Drafted(plain_s=0.02, row_s=0.001, draft_s=0.002, right="+")
    speed = it.run(200)
    assert it.proposed[0] == 0
    assert max(it.proposed) == 8
    # Eight tokens and one more, in a step of eight rows more and eight drafts.
    assert speed > 0.9 * 9 / (0.02 + 8 * 0.003)


@pytest.mark.parametrize(
    ("right", "draft_s"), [("-", 0.002), ("--+", 0.004), ("+", 0.05)], ids=["wrong", "mostly wrong", "slow"]
)
def test_a_draft_model_that_does_not_pay_is_left_alone(right: str, draft_s: float) -> None:
    it = Drafted(plain_s=0.02, row_s=0.002, draft_s=draft_s, right=right)
    assert it.run(3000) > 0.97 / it.plain_s
    assert sum(map(bool, it.proposed)) > 1, "it is tried now and then"


def test_a_draft_model_that_never_pays_is_tried_less_and_less_until_it_gains() -> None:
    it = Drafted(plain_s=0.02, row_s=0.002, draft_s=0.002, right="-")
    it.run(RETRY_STEPS * 20)
    tries = [step for step, number in enumerate(it.proposed) if number]
    pauses = [later - earlier for earlier, later in pairwise(tries) if later - earlier > RETRY_STEPS / 2]
    assert [round(pause / RETRY_STEPS) for pause in pauses] == [1, 2, 4, 8]
    it.right = "+"
    it.run(RETRY_STEPS * 32)
    assert it.proposed[-1] == 8
    # It was seen to gain: the next pause is the first one again.
    it.right = "-"
    it.run(1000)
    it.right = "+"
    it.run(2 * RETRY_STEPS)
    assert it.proposed[-1] == 8


def test_a_draft_model_alone_is_asked_for_a_token_at_least() -> None:
    it = Drafted(plain_s=0.02, row_s=0.002, draft_s=0.002, right="-", only_if_faster=False)
    it.run(100)
    assert set(it.proposed[1:]) == {1}


def test_drafts_behind_other_tokens_are_not_proposed() -> None:
    proposer, completion = DraftProposer(), completion_of([1, 2, 3], num_prompt=3)
    proposer.take(completion, [4, 5, 6])
    assert proposer.propose(completion, 2) == ([4, 5], 0)
    completion.token_ids.append(4)
    assert not proposer.propose(completion, 2).token_ids
    proposer.ended(completion)
    assert not proposer._drafts


def test_drafts_for_others_are_refused() -> None:
    settings = engine_config(speculation=DRAFTING)
    bench = Bench(settings, num_blocks=40)
    bench.add(generation("a", [1, 2], max_tokens=20))
    bench.step()
    step = bench.schedule()
    assert step is not None
    assert list(step.plan.draft_slots) == [0]
    bench.in_flight.submit(step)
    assert bench.schedule() is None, "nothing goes out beside drafts"
    result = bench.ranks.execute(step.plan)
    result.drafts.add(slot=3, token_ids=[1])
    [completion] = step.decodes.completions
    known = list(completion.token_ids)
    with pytest.raises(StepMismatch, match="slot 3, which wants none"):
        bench.scheduler.apply(step, result)
    assert completion.token_ids == known, "a result is refused before anything of it is taken"


def test_steps_out_come_back_before_tokens_are_proposed() -> None:
    settings = engine_config(speculation=PROPOSING)
    bench = Bench(settings, num_blocks=40, proposer=fake_oracle(rate=1.0, vocab_size=settings.vocab_size))
    bench.add(generation("a", [1, 2], max_tokens=40))
    bench.send()
    bench.receive()
    first = bench.send()
    assert first is not None
    assert first.proposals
    assert bench.send() is None, "nothing goes out beside proposals"
    bench.receive()
    in_flight = StepsInFlight()
    in_flight.submit(ScheduledStep(ranks_pb2.StepPlan()))
    assert bench.scheduler.schedule(0.0, in_flight=in_flight) is None, "it waits for what is out"


def test_a_guess_is_settled_by_the_tokens_that_come() -> None:
    acceptance = Acceptance({0: 0.4, 4: 0.8})
    before = acceptance.rate(3)
    acceptance.guess(Proposal([5, 6, 7], 3), begin=2)
    acceptance.look([1, 1, 5])
    assert acceptance.is_guessing
    assert acceptance.rate(3) == before
    acceptance.look([1, 1, 5, 6, 7, 9])
    assert not acceptance.is_guessing
    better = acceptance.rate(3)
    assert better > before
    acceptance.guess(Proposal([5, 6, 7], 3), begin=2)
    acceptance.look([1, 1, 9])
    assert acceptance.rate(3) < better
    assert acceptance.rates[4] == acceptance.rate(9) == 0.8, "those of longer matches are counted apart"
