"""Completions bound to a form: what masks allow, what is refused, and that no constraint harms the gateway."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from hetero_api.v1 import inference_pb2
from hetero_api.v1.ranks_pb2 import Sampling
from hetero_gateway.engine.errors import EngineFault, InvalidRequest
from hetero_gateway.engine.request import Constraint, ConstraintKind, GenerationRequest
from hetero_gateway.engine.text.constraints import (
    MAX_CONSTRAINT_CHARS,
    CompiledConstraint,
    ConstraintCompiler,
    TokenMatcher,
    all_tokens,
)
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from tests.unit.engine.core_setup import TOKENIZER, VOCAB_SIZE, Engine, engine, read, turn_loop, until
from tests.unit.engine.engine_setup import engine_config
from tests.unit.engine.tiny_tokenizers import byte_fallback_tokenizer

pytestmark = pytest.mark.unit

EOS = 1
# As models have it: rows that no token has.
PADDED_SIZE = VOCAB_SIZE + 13
FALLBACK = TextTokenizer(byte_fallback_tokenizer(), byte_level=False, chat_template=None)


def compiler(tokenizer: TextTokenizer = TOKENIZER, *, vocab_size: int = PADDED_SIZE) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=frozenset([EOS]))


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def choice(*texts: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, "", texts)


def grammar(text: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, text)


def allowed(mask: bytes) -> list[int]:
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]


def drive(matcher: TokenMatcher, chooser: random.Random, *, most: int = 400, eager: float = 0.3) -> list[int] | None:
    """Random allowed tokens up to the end-of-sequence token; None if it does not come."""
    token_ids: list[int] = []
    for _ in range(most):
        among = allowed(matcher.mask())
        if EOS in among and (among == [EOS] or chooser.random() < eager):
            return token_ids
        token_id = chooser.choice([each for each in among if each != EOS])
        matcher.advance(token_id)
        token_ids.append(token_id)
    return None


# --- masks ----------------------------------------------------------------------------------------------


async def test_a_mask_has_a_bit_a_token_of_the_vocabulary_and_none_for_padding() -> None:
    compiled = await compiler().compile(regex("(?s:.)*"))
    mask = compiled.matcher().mask()
    assert len(mask) == -(-PADDED_SIZE // 8)
    assert EOS in allowed(mask)
    assert max(allowed(mask)) < VOCAB_SIZE
    everything = allowed(all_tokens(PADDED_SIZE))
    assert everything == list(range(PADDED_SIZE))


async def test_a_tokenizer_that_knows_more_tokens_than_the_model_has_rows_is_cut() -> None:
    size = VOCAB_SIZE - 100
    mask = (await compiler(vocab_size=size).compile(regex("(?s:.)*"))).matcher().mask()
    assert len(mask) == -(-size // 8)
    assert max(allowed(mask)) < size


async def test_a_complete_form_allows_only_the_end_of_sequence() -> None:
    matcher = (await compiler().compile(regex("ab"))).matcher()
    for token_id in TOKENIZER.encode("ab")[1:]:
        matcher.advance(token_id)
    assert allowed(matcher.mask()) == [EOS]


async def test_a_choice_that_begins_another_may_end_or_go_on() -> None:
    matcher = (await compiler().compile(choice("ab", "abc", 'x"\n\\y', "🙂"))).matcher()
    begins = {TOKENIZER.decode([token_id]) for token_id in allowed(matcher.mask())}
    assert begins >= {"a", "x"}
    assert "b" not in begins
    for token_id in TOKENIZER.encode("ab")[1:]:
        matcher.advance(token_id)
    assert {TOKENIZER.decode([token_id]) for token_id in allowed(matcher.mask())} == {"", "c"}


async def test_matchers_of_one_constraint_do_not_know_of_one_another() -> None:
    compiled = await compiler().compile(regex("ab"))
    first, second = compiled.matcher(), compiled.matcher()
    first.advance(TOKENIZER.encode("a")[1])
    fresh = compiled.matcher()
    assert allowed(second.mask()) == allowed(fresh.mask())
    assert allowed(first.mask()) != allowed(second.mask())


async def test_the_same_constraint_is_compiled_once() -> None:
    one = compiler()
    assert await one.compile(regex("a+")) is await one.compile(regex("a+"))


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "field", "problem"),
    [
        (regex("a("), "sampling.regex", "unclosed group"),
        (regex("(?=a)b"), "sampling.regex", "look-around"),
        (grammar("start: foo"), "sampling.grammar", 'unknown name: "foo"'),
        (grammar("start: ("), "sampling.grammar", "1("),
        (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "sampling.json_schema", "is no JSON"),
        (Constraint(ConstraintKind.JSON_SCHEMA, ""), "sampling.json_schema", "is no JSON"),
        (schema([1]), "sampling.json_schema", "must be a JSON object (a schema), not [1]"),
        (schema({"type": "strin"}), "sampling.json_schema", "Invalid type: strin"),
        (schema({"not": {}}), "sampling.json_schema", 'Unimplemented keys: ["not"]'),
        (schema({"type": "integer", "minimum": 3, "maximum": 1}), "sampling.json_schema", "Unsatisfiable"),
        (schema(False), "sampling.json_schema", "Unsatisfiable"),
        (schema({"$ref": "http://x/y"}), "sampling.json_schema", "http://x/y"),
        (regex("a" * (MAX_CONSTRAINT_CHARS + 1)), "sampling.regex", "at most 65536 characters, not 65537"),
        (choice("a" * MAX_CONSTRAINT_CHARS, "b"), "sampling.choice", "at most 65536 characters"),
        (regex("[^\\x00-\\x{10FFFF}]"), "sampling.regex", ""),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, Constraint) else None,
)
async def test_a_bad_constraint_is_refused_by_its_field_in_the_librarys_words(
    constraint: Constraint, field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await compiler().compile(constraint)
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert len(caught.value.problem) <= 600


async def test_a_model_without_an_end_of_sequence_takes_no_constraint() -> None:
    one = ConstraintCompiler(TOKENIZER, vocab_size=PADDED_SIZE, eos_token_ids=frozenset())
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        await one.compile(regex("a"))


def chain(rule: Callable[[int], str], *, head: str, tail: str) -> str:
    """The longest chain of rules that the bound on a constraint's size allows."""
    rules, size, number = [head], len(head) + len(tail) + 10, 0
    while size + len(rule(number)) <= MAX_CONSTRAINT_CHARS:
        rules.append(rule(number))
        size += len(rules[-1])
        number += 1
    return "".join([*rules, tail.replace("LAST", str(number))])


DEEP = [
    grammar(chain(lambda i: f"r{i}:r{i + 1}\n", head="start:r0\n", tail='rLAST:"c"\n')),
    grammar(chain(lambda i: f'R{i}:R{i + 1}|"b"\n', head="start:R0\n", tail='RLAST:"c"\n')),
    grammar("start:" + "(" * 30_000 + '"a"' + ")" * 30_000),
    regex("(?:" * 16_000 + "a" + ")" * 16_000),
    regex("a{1000}" * 3_000),
    regex("(a?){200}" * 3_000),
    Constraint(ConstraintKind.JSON_SCHEMA, '{"items":' * 6_000 + "{}" + "}" * 6_000),
    Constraint(
        ConstraintKind.JSON_SCHEMA,
        chain(
            lambda i: f'"{i}":{{"items":{{"$ref":"#/$defs/{i + 1}"}}}},',
            head='{"$ref":"#/$defs/0","$defs":{',
            tail='"LAST":{}}}',
        ),
    ),
    Constraint(
        ConstraintKind.JSON_SCHEMA,
        chain(
            lambda i: f'"{i}":{{"anyOf":[{{"$ref":"#/$defs/{i + 1}"}},{{"type":"null"}}]}},',
            head='{"$ref":"#/$defs/0","$defs":{',
            tail='"LAST":{}}}',
        ),
    ),
]


@pytest.mark.parametrize("number", range(len(DEEP)))
async def test_the_deepest_constraint_neither_kills_the_process_nor_holds_up_the_loop(number: int) -> None:
    """The library recurses: without stacks of their own these ended the process with a segmentation fault."""
    compiling = asyncio.create_task(_compile_or_refuse(DEEP[number]))
    loop, longest_s = asyncio.get_running_loop(), 0.0
    while not compiling.done():
        began_s = loop.time()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, loop.time() - began_s)
    matcher = await compiling
    if matcher is not None:
        with suppress(InvalidRequest):
            drive(matcher, random.Random(0), most=5)
    assert longest_s < 0.25


async def _compile_or_refuse(constraint: Constraint) -> TokenMatcher | None:
    try:
        return (await compiler().compile(constraint)).matcher()
    except InvalidRequest:
        return None


# --- whatever is drawn fits the form --------------------------------------------------------------------


def random_schema(chooser: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "pattern"]
    if depth < 3:
        kinds += ["object", "array", "anyOf"] * 2
    match chooser.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": chooser.randrange(8)}
        case "integer":
            low = chooser.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + chooser.randrange(1, 200)}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "enum":
            return {"enum": chooser.sample(["a", "ab", "né", "你好", 1, 12, True, None], 3)}
        case "pattern":
            return {"type": "string", "pattern": chooser.choice(["^[a-f]{2,5}$", "^x(yz)?$", "^\\d{3}-\\d{2}$"])}
        case "array":
            least = chooser.randrange(3)
            items = random_schema(chooser, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + chooser.randrange(3)}
        case "anyOf":
            return {"anyOf": [random_schema(chooser, depth + 1) for _ in range(2)]}
        case _:
            names = chooser.sample(["a", "b", "name", "näme", "x y"], chooser.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(chooser, depth + 1) for name in names},
                "required": names[: chooser.randrange(len(names) + 1)],
                "additionalProperties": False,
            }


async def test_whatever_is_drawn_under_a_random_schema_validates() -> None:
    one, complete = compiler(), 0
    for seed in range(120):
        chooser = random.Random(seed)
        form = random_schema(chooser)
        token_ids = drive((await one.compile(schema(form))).matcher(), chooser)
        if token_ids is None:
            # White space between tokens is allowed without bound.
            continue
        complete += 1
        jsonschema.validate(json.loads(TOKENIZER.decode(token_ids)), form)
    assert complete > 90


def random_regex(chooser: random.Random, depth: int = 0) -> str:
    leaves = ["a", "b", "[0-9]", "[a-z]", "[^x\\n]", "é", "你好", "\\.", "🙂", " "]
    if depth > 2 or chooser.random() < 0.3:
        return chooser.choice(leaves)
    inner = [random_regex(chooser, depth + 1) for _ in range(chooser.randrange(1, 4))]
    match chooser.randrange(3):
        case 0:
            return "".join(inner)
        case 1:
            return "(?:" + "|".join(inner) + ")"
        case _:
            return f"(?:{''.join(inner)})" + chooser.choice(["?", "*", "+", "{2}", "{1,3}"])


@pytest.mark.parametrize("tokenizer", [TOKENIZER, FALLBACK], ids=["byte-level", "byte-fallback"])
async def test_whatever_is_drawn_under_a_random_expression_matches(tokenizer: TextTokenizer) -> None:
    one, complete = compiler(tokenizer), 0
    for seed in range(150):
        chooser = random.Random(seed)
        form = random_regex(chooser)
        token_ids = drive((await one.compile(regex(form))).matcher(), chooser)
        if token_ids is not None:
            complete += 1
            text = b"".join(map(tokenizer.token_bytes, token_ids)).decode()
            assert re.fullmatch(form, text), (form, text)
    assert complete > 100


async def test_whatever_is_drawn_among_choices_is_one_of_them() -> None:
    one = compiler()
    for seed in range(60):
        chooser = random.Random(seed)
        pieces = ["a", "b", '"', "\\", "\n", "你", "🙂", " ", "\x00", "\x7f", "|", "(", "/"]
        texts = {"".join(chooser.choices(pieces, k=chooser.randrange(1, 6))) for _ in range(chooser.randrange(1, 9))}
        token_ids = drive((await one.compile(choice(*sorted(texts)))).matcher(), chooser)
        assert token_ids is not None
        assert TOKENIZER.decode(token_ids) in texts


# --- through the engine ---------------------------------------------------------------------------------


async def constrained(request_id: str, constraint: Constraint, **fields: Any) -> GenerationRequest:
    compiled = await compiler(vocab_size=VOCAB_SIZE).compile(constraint)
    sampling = Sampling(temperature=1.0, seed=fields.pop("seed", 0))
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=(5, 6, 7),
        sampling=sampling,
        max_tokens=40,
        constraint=compiled,
        **fields,
    )


def config(**changes: Any) -> Any:
    return engine_config(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]), **changes)


@pytest.mark.parametrize("most", [1, 2])
async def test_constrained_and_free_requests_share_steps(most: int) -> None:
    async with engine(config(max_steps_in_flight=most, max_num_seqs=8)) as it:
        asked = [await constrained(f"r{seed}", regex("(?:ab|cd){2,4}x"), seed=seed) for seed in range(4)]
        free = GenerationRequest(
            request_id="free", prompt_token_ids=(5, 6), sampling=Sampling(seed=1), max_tokens=20, ignore_eos=True
        )
        answers = await asyncio.gather(*(read(it.core.submit(each)) for each in [*asked, free]))
        for answer in answers[:-1]:
            assert re.fullmatch("(?:ab|cd){2,4}x", answer.text)
            assert (answer.finished.reason, answer.finished.stop_token_id) == (inference_pb2.FINISH_REASON_STOP, EOS)
        assert len(answers[-1].token_ids) == 20
        assert it.broken == []


async def test_a_plan_with_masked_draws_goes_out_before_the_last_result_came() -> None:
    async with engine(config()) as it:
        it.ranks.hold()
        stream = it.core.submit(await constrained("r", regex("[ab]{20}")))
        await until(lambda: it.ranks.num_out == 2)
        it.ranks.let_go()
        assert re.fullmatch("[ab]{20}", (await read(stream)).text)


async def test_each_completion_keeps_to_the_form_by_itself() -> None:
    async with engine(config()) as it:
        answer = await read(it.core.submit(await constrained("r", regex("[ab]{6}"), n=3)))
    assert all(re.fullmatch("[ab]{6}", text) for text in answer.texts.values())
    assert len(answer.texts) == 3


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
async def test_a_form_is_kept_to_over_a_lost_group(steps: int) -> None:
    async with engine(config()) as it:
        undisturbed = (await read(it.core.submit(await constrained("r", regex("[ab]{20}"), seed=4)))).token_ids
        it.ranks.hold()
        stream = it.core.submit(await constrained("r", regex("[ab]{20}"), seed=4))
        for _ in range(steps):
            await _do_one(it)
        it.core.lose("rank 1 died")
        it.new_group()
        assert (await read(stream)).token_ids == undisturbed


async def _do_one(it: Engine) -> None:
    await until(lambda: it.ranks.can_do)
    it.ranks.do_one()
    await turn_loop(4)


@pytest.mark.parametrize("count", [0, 1, 4, 9])
async def test_a_form_is_kept_to_behind_what_was_received(count: int) -> None:
    async with engine(config()) as it:
        whole = (await read(it.core.submit(await constrained("r", regex("[ab]{20}"), seed=4)))).token_ids
        resumed = await constrained("r", regex("[ab]{20}"), seed=4, received=(tuple(whole[:count]),))
        assert (await read(it.core.submit(resumed))).token_ids == whole[count:]
        ended = await constrained("r", regex("[ab]{20}"), seed=4, received=(tuple(whole),))
        assert (await read(it.core.submit(ended))).finished.stop_token_id == EOS


async def test_received_tokens_that_do_not_fit_the_form_are_refused() -> None:
    async with engine(config()) as it:
        received = tuple(TOKENIZER.encode("abx")[1:])
        with pytest.raises(InvalidRequest) as caught:
            it.core.submit(await constrained("r", regex("[ab]{20}"), received=(received,)))
        assert caught.value.field.startswith("received[0].token_ids[")


async def test_a_request_aborted_while_its_masks_are_computed_leaves_the_step_in_order() -> None:
    async with engine(config()) as it:
        streams = [it.core.submit(await constrained(f"r{seed}", regex("[ab]{20}"), seed=seed)) for seed in range(3)]
        await until(lambda: it.ranks.steps > 0)
        it.core.abort("r1")
        answers = await asyncio.gather(*map(read, streams))
        assert answers[1].finished.reason == inference_pb2.FINISH_REASON_ABORT
        assert all(re.fullmatch("[ab]{20}", answers[index].text) for index in (0, 2))
        assert it.broken == []


async def test_a_rank_that_ignores_masks_loses_the_group() -> None:
    async with engine(config()) as it:
        stream = it.core.submit(await constrained("r", regex("[ab]{20}")))
        it.ranks.spoil = lambda result: result.token_ids.__setitem__(0, 2) if result.token_ids else None
        await until(lambda: it.broken != [])
        assert "drew token 2, against its mask" in it.broken[0]
        it.new_group()
        assert re.fullmatch("[ab]{20}", (await read(stream)).text)


async def test_a_form_that_becomes_too_complex_ends_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(config()) as it:
        problem = InvalidRequest("sampling.regex", "became too complex")
        asked = await constrained("bad", regex("[ab]{20}"))
        good = it.core.submit(await constrained("good", regex("[ab]{20}")))
        matcher = CompiledConstraint.matcher
        monkeypatch.setattr(CompiledConstraint, "matcher", lambda self: _Failing(matcher(self), problem))
        answer = await read(it.core.submit(asked))
        assert answer.error is problem
        assert re.fullmatch("[ab]{20}", (await read(good)).text)
        assert it.broken == []


class _Failing(TokenMatcher):
    """Cannot go on behind three tokens."""

    def __init__(self, matcher: TokenMatcher, problem: InvalidRequest) -> None:
        self._within = matcher
        self._problem = problem
        self._left = 3

    def mask(self) -> bytes:
        if not self._left:
            raise self._problem
        return self._within.mask()

    def advance(self, token_id: int) -> None:
        self._left -= 1
        self._within.advance(token_id)


async def test_a_constraint_that_was_not_compiled_is_a_bug() -> None:
    async with engine(config()) as it:
        asked = GenerationRequest(request_id="r", prompt_token_ids=(5,), sampling=Sampling(), constraint=regex("a"))
        with pytest.raises(EngineFault, match="not compiled"):
            it.core.submit(asked)
