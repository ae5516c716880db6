"""VllmEngine, the service that a router calls: every method, as its messages have it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hetero_api.v1 import admin_pb2
from hetero_gateway.engine.block_pool import CacheLog
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from hetero_gateway.server.router.cache_events import CacheEvents
from tests.unit.engine.fake_ranks import embedding_alone, logprobs_alone, tokens_alone
from tests.unit.engine.test_cache_log import store
from tests.unit.server.router_setup import SERVICE, EngineCalls, RouterBench, generate, read_tokenizer
from tests.unit.server.server_setup import VOCAB_SIZE, GatewayBench, GrpcRank, read_all, request, served_model

pytestmark = pytest.mark.unit

TEXT = read_tokenizer()
PROMPT = TEXT.encode("hello there")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[RouterBench]:
    """A gateway whose rank has not joined."""
    async with RouterBench(served_model(tmp_path, gateway={"maxQueuedRequests": 4})) as running:
        yield running


@pytest.fixture
async def rank(bench: RouterBench) -> GrpcRank:
    """The rank of a gateway that serves."""
    joined, _ = await bench.join()
    return joined


def alone(prompt: list[int], count: int) -> list[int]:
    return tokens_alone(prompt, seed=7, count=count, vocab_size=VOCAB_SIZE)


async def completes(call: Any) -> list[vllm.GenerateComplete]:
    return [each.complete for each in await read_all(call) if each.HasField("complete")]


async def refused(call: Any) -> str:
    """The message of a call that is refused for what it asks."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


# --- Generate -------------------------------------------------------------------------------------------


async def test_tokens_come_as_they_are_drawn_and_whole_at_the_end(bench: RouterBench, rank: GrpcRank) -> None:
    answers = await read_all(bench.engine().Generate(generate(PROMPT, seed=7, temperature=1.0, top_p=1.0, n=1)))
    *chunks, last = answers
    expected = alone(PROMPT, 8)
    if 256 in expected:
        expected = expected[: expected.index(256) + 1]
    assert [token for each in chunks for token in each.chunk.token_ids] == expected
    assert [each.chunk.completion_tokens for each in chunks][-1] == len(expected)
    assert list(last.complete.output_ids) == expected
    assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (len(PROMPT), len(expected))
    assert rank.num_plans


async def test_what_is_not_streamed_is_one_answer_a_completion(bench: RouterBench, rank: GrpcRank) -> None:
    rank.say([97, 98])
    answers = await read_all(bench.engine().Generate(generate(PROMPT, n=2, stream=False)))
    assert [each.WhichOneof("response") for each in answers] == ["complete", "complete"]
    assert sorted(each.complete.index for each in answers) == [0, 1]
    for each in answers:
        assert list(each.complete.output_ids) == [97, 98, 256]
        assert (each.complete.finish_reason, each.complete.matched_token_id) == ("stop", 256)


async def test_a_stop_string_ends_an_answer_and_is_named(bench: RouterBench, rank: GrpcRank) -> None:
    rank.say(TEXT.encode("one two three"))
    (told,) = await completes(bench.engine().Generate(generate(PROMPT, stop=["two"], max_tokens=20)))
    assert (told.finish_reason, told.matched_stop_str) == ("stop", "two")
    assert TEXT.decode(told.output_ids) == "one two"


async def test_a_length_and_a_stop_token_end_an_answer(bench: RouterBench, rank: GrpcRank) -> None:
    rank.say(TEXT.encode("abcdef"))
    engine = bench.engine()
    a, b = TEXT.encode("ab")
    (cut,) = await completes(engine.Generate(generate(PROMPT, max_tokens=3)))
    (stopped,) = await completes(engine.Generate(generate(PROMPT, stop_token_ids=[b], request_id="s")))
    assert (cut.finish_reason, cut.WhichOneof("matched_stop")) == ("length", None)
    assert (stopped.finish_reason, stopped.matched_token_id, list(stopped.output_ids)) == ("stop", b, [a, b])


async def test_log_probabilities_are_the_engines(bench: RouterBench, rank: GrpcRank) -> None:
    rank.say([97, 98])
    request = generate(PROMPT, logprobs=0, prompt_logprobs=0, stream=False)
    (told,) = await completes(bench.engine().Generate(request))
    tokens = [*PROMPT, 97, 98, 256]
    expected = logprobs_alone(tokens, begin=1)
    prompt = told.input_logprobs
    assert list(prompt.token_ids) == PROMPT
    assert not prompt.token_logprobs[0].HasField("value")
    assert [each.value for each in prompt.token_logprobs[1:]] == [e.logprob for e in expected[: len(PROMPT) - 1]]
    assert list(told.output_logprobs.token_logprobs) == [e.logprob for e in expected[len(PROMPT) - 1 :]]
    assert list(told.output_logprobs.token_ids) == tokens[len(PROMPT) :]


async def test_a_repeated_prompt_is_found_in_the_cache(bench: RouterBench, rank: GrpcRank) -> None:
    engine = bench.engine()
    for expected in (0, 8):
        (told,) = await completes(engine.Generate(generate(PROMPT, max_tokens=1)))
        assert told.cached_tokens == expected
    assert rank.num_plans


CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": vllm.ChoiceConstraint(choices=["yes"])}, "yes"),
    "regex": ({"regex": "[x]{3}"}, "xxx"),
    "schema": ({"json_schema": '{"const": 5}'}, "5"),
    "lark": ({"grammar": 'start: "hey"'}, "hey"),
    "GBNF": ({"grammar": 'root ::= "hoy"'}, "hoy"),
    "structural tag": (
        {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "triggered_tags", "triggers": ["<f"], "at_least_one": True, "stop_after_first": True,
                        "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"const": 1}},
                                  "end": "</f>"}],
                    },
                }
            )
        },
        "<f=a>1</f>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_answers_keep_to_a_form(bench: RouterBench, rank: GrpcRank, name: str) -> None:
    fields, expected = CONSTRAINTS[name]
    (told,) = await completes(bench.engine().Generate(generate(PROMPT, max_tokens=30, **fields)))
    assert TEXT.decode(told.output_ids) == expected
    assert told.matched_token_id == 256
    assert rank.num_plans


async def test_a_json_object_is_one(bench: RouterBench, rank: GrpcRank) -> None:
    request = generate(PROMPT, max_tokens=1, json_object=True)
    (told,) = await completes(bench.engine().Generate(request))
    assert TEXT.decode(told.output_ids) == "{"


REFUSED: dict[str, tuple[vllm.GenerateRequest, str]] = {
    "transfers": (vllm.GenerateRequest(kv_transfer_params_json="{}"), "kv_transfer_params_json: is not served"),
    "media": (vllm.GenerateRequest(media_refs=vllm.MediaRefs()), "media_refs: is not served"),
    "a rank": (vllm.GenerateRequest(data_parallel_rank=2), "data_parallel_rank: must be 0 or absent"),
    "cut prompts": (generate(PROMPT, truncate_prompt_tokens=4), "truncate_prompt_tokens: is not served"),
    "all log-probabilities": (generate(PROMPT, logprobs=-1), "logprobs: must not be -1"),
    "a biased token": (generate(PROMPT, logit_bias={-1: 1.0}), "logit_bias: token -1"),
    "no prompt": (vllm.GenerateRequest(), "is empty"),
    "a token": (generate([VOCAB_SIZE]), "vocabulary"),
    "temperature": (generate(PROMPT, temperature=-1.0), "temperature"),
    "a tag": (generate(PROMPT, structural_tag="{}"), "structural_tag: needs an object 'format'"),
    "a kind of tag": (
        generate(PROMPT, structural_tag='{"format": {"type": "token"}}'), "has a format of type 'token', which is not"
    ),
    "a grammar": (generate(PROMPT, grammar="root ::= ("), "grammar"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_served_is_refused_by_name(bench: RouterBench, rank: GrpcRank, name: str) -> None:
    request, problem = REFUSED[name]
    assert problem in await refused(bench.engine().Generate(request))
    assert bench.gateway.core.is_idle
    assert rank.epoch


async def test_a_form_comes_behind_a_thought_unless_it_begins_at_once(tmp_path: Path) -> None:
    model = served_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<think>\n")
    model = served_model_again(tmp_path, model)
    prompt = TEXT.encode("hi<think>\n")
    async with RouterBench(model) as bench:
        rank, _ = await bench.join()
        rank.say(TEXT.encode("Hm {</think>5"))
        engine = bench.engine()
        info = await engine.GetServerInfo(vllm.GetServerInfoRequest())
        (told,) = await completes(engine.Generate(generate(prompt, max_tokens=40, json_schema='{"const": 5}')))
        rank.say(TEXT.encode("5"))
        request = generate(prompt, max_tokens=20, json_schema='{"const": 5}', grammar_from_first_token=True)
        (at_once,) = await completes(engine.Generate(request))
    assert info.constrained_decoding_start == "after_reasoning"
    assert TEXT.decode(told.output_ids) == "Hm {</think>5"
    assert TEXT.decode(at_once.output_ids) == "5"


def served_model_again(folder: Path, model: Any) -> Any:
    """The model with the template that its folder has now."""
    return replace(model, tokenizer=TextTokenizer.from_directory(folder))


def in_engine(bench: RouterBench) -> int:
    stats = bench.gateway.core.stats()
    return stats.running_requests + stats.waiting_requests


async def test_abort_and_a_client_that_goes_away_end_requests(bench: RouterBench, rank: GrpcRank) -> None:
    rank.may_step.clear()
    engine = bench.engine()
    aborted = engine.Generate(generate(PROMPT, request_id="a", max_tokens=40))
    left = engine.Generate(generate(PROMPT, request_id="b", max_tokens=40))
    await bench.until(lambda: in_engine(bench) == 2)
    await engine.Abort(vllm.AbortRequest(request_ids=["a", "unknown"]))
    left.cancel()
    await bench.until(lambda: bench.gateway.core.is_idle)
    (told,) = await completes(aborted)
    assert told.finish_reason == "abort"
    rank.may_step.set()


# --- what the engine is ---------------------------------------------------------------------------------


async def test_health_follows_the_group(bench: RouterBench) -> None:
    engine = bench.engine()
    assert not (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
    await bench.join()
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_the_model_the_server_and_its_load_are_told(bench: RouterBench, rank: GrpcRank) -> None:
    engine = bench.engine()
    await read_all(engine.Generate(generate(PROMPT)))
    model = await engine.GetModelInfo(vllm.GetModelInfoRequest())
    server = await engine.GetServerInfo(vllm.GetServerInfoRequest())
    loads = await engine.GetLoads(vllm.GetLoadsRequest())
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("g", 64, VOCAB_SIZE)
    assert (list(model.eos_token_ids), model.is_generation, list(model.architectures)) == (
        [256], True, ["LlamaForCausalLM"]
    )  # fmt: skip
    assert (server.server_type, server.block_size, server.max_num_seqs) == ("vllm-grpc", 4, 2)
    assert server.constrained_decoding_start == "first_token"
    assert (server.active_requests, server.is_paused) == (0, False)
    (load,) = loads.loads
    assert (load.num_total_reqs, load.max_running_requests) == (0, 2)
    assert load.max_total_num_tokens > 64
    assert rank.epoch


async def test_the_models_defaults_are_told(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20}')
    async with RouterBench(served_model(tmp_path)) as bench:
        told = await bench.engine().GetModelInfo(vllm.GetModelInfoRequest())
    assert json.loads(told.default_sampling_params_json) == {"temperature": 0.5, "top_k": 20}


async def test_the_tokenizer_comes_as_an_archive(bench: RouterBench, tmp_path: Path) -> None:
    chunks = await read_all(bench.engine().GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(data).hexdigest()]
    target = tmp_path / "unpacked"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(target)
    again, ours = TextTokenizer.from_directory(target), bench.model.tokenizer
    assert (again.to_json(), again.chat_template) == (ours.to_json(), ours.chat_template)
    assert json.loads((target / "config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())


async def test_an_embedding_is_of_the_last_token(bench: RouterBench, rank: GrpcRank) -> None:
    request = vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=PROMPT))
    told = await bench.engine().Embed(request)
    values = embedding_alone(PROMPT, is_mean=False)
    assert list(told.embedding) == pytest.approx([value / math.hypot(*values) for value in values])
    assert (told.prompt_tokens, told.embedding_dim) == (len(PROMPT), len(values))
    assert rank.epoch


async def test_profiles_are_named_as_not_implemented(bench: RouterBench) -> None:
    engine = bench.engine()
    for call in (engine.StartProfile(common.StartProfileRequest()), engine.StopProfile(common.StopProfileRequest())):
        with pytest.raises(grpc.aio.AioRpcError, match=r"Admin\.Profile") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_every_method_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [method.name for method in SERVICE.methods if f".{method.name}(" not in text] == []


async def test_without_a_port_there_is_no_door(tmp_path: Path) -> None:
    async with GatewayBench(served_model(tmp_path)) as bench:
        assert bench.addresses.router == ""
        assert not bench.gateway.core.cache_log.is_on


# --- its cache ------------------------------------------------------------------------------------------


class Mirror:
    """What a router knows of the cache by the stream."""

    def __init__(self) -> None:
        self.chains: dict[int, tuple[int, ...]] = {}
        """Tokens up to the end of each block, by its hash."""
        self.numbers: list[int] = []

    def take(self, batch: common.KvEventBatch) -> None:
        self.numbers.append(batch.sequence_number)
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    before = self.chains[event.stored.parent_block_hash] if event.stored.parent_block_hash else ()
                    for block in event.stored.blocks:
                        before = (*before, *block.token_ids)
                        assert len(block.token_ids) == block.block_size == 4
                        self.chains[block.block_hash] = before
                case "removed":
                    for key in event.removed.block_hashes:
                        del self.chains[key]
                case "cleared":
                    self.chains.clear()


async def follow(mirror: Mirror, engine: EngineCalls, start: int = 0) -> asyncio.Task[None]:
    """Have the mirror follow the stream; it has the first batch when this returns."""
    call = engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=start))
    mirror.take(await call.read())

    async def go_on() -> None:
        while (batch := await call.read()) is not grpc.aio.EOF:
            mirror.take(batch)

    return asyncio.create_task(go_on())


def heads(tokens: list[int]) -> set[tuple[int, ...]]:
    """The chains of a sequence's full blocks."""
    return {tuple(tokens[:end]) for end in range(4, len(tokens) + 1, 4)}


async def test_blocks_are_told_as_they_are_stored_removed_and_cleared(bench: RouterBench, rank: GrpcRank) -> None:
    rank.say([97])
    engine = bench.engine()
    early, late, back = Mirror(), Mirror(), Mirror()
    first = heads([*PROMPT, 97])
    following = await follow(early, engine)
    await read_all(engine.Generate(generate(PROMPT)))
    await bench.until(lambda: set(early.chains.values()) == first)
    tasks = [following, await follow(late, engine)]
    assert late.chains == early.chains
    place = early.numbers[-1]
    other = TEXT.encode("another text")
    await read_all(engine.Generate(generate(other)))
    both = first | heads([*other, 97])
    await bench.until(lambda: set(early.chains.values()) == set(late.chains.values()) == both)
    # One that was away goes on where it was.
    back.chains = {key: chain for key, chain in early.chains.items() if chain in first}
    tasks.append(await follow(back, engine, start=place + 1))
    await bench.until(lambda: back.chains == early.chains)
    assert (await engine.FlushCache(common.FlushCacheRequest())).success
    await bench.until(lambda: not early.chains and not back.chains)
    (told,) = await completes(engine.Generate(generate(PROMPT, max_tokens=1)))
    assert told.cached_tokens == 0
    for mirror in (early, late, back):
        assert mirror.numbers == list(range(mirror.numbers[0], mirror.numbers[-1] + 1))
    for task in tasks:
        task.cancel()


async def test_blocks_that_are_evicted_or_lost_are_told(bench: RouterBench) -> None:
    rank, life = await bench.join()
    rank.say([97])
    reset = admin_pb2.ResetCacheRequest(layout=admin_pb2.CACHE_LAYOUT_PAGED, num_blocks=40)
    await bench.admin().ResetCache(reset)
    engine, mirror = bench.engine(), Mirror()
    following = await follow(mirror, engine)
    for number in range(8):
        await read_all(engine.Generate(generate([number, *range(38)], max_tokens=1)))
    cached = bench.gateway.core.stats().cached_blocks
    assert 30 < cached < 8 * 9
    await bench.until(lambda: len(mirror.chains) == cached)
    life.cancel()
    await bench.until(lambda: not mirror.chains)
    following.cancel()


async def test_prompts_with_a_salt_are_not_told(bench: RouterBench, rank: GrpcRank) -> None:
    rank.say([97])
    mirror = Mirror()
    following = await follow(mirror, bench.engine())
    await read_all(bench.inference().Generate(request(PROMPT, cache_salt="mine")))
    await read_all(bench.engine().Generate(generate(TEXT.encode("next"))))
    await bench.until(lambda: bool(mirror.chains))
    assert set(mirror.chains.values()) == heads(TEXT.encode("next"))
    following.cancel()


async def test_a_batch_that_a_snapshot_seals_is_not_told_again() -> None:
    log = CacheLog()
    events = CacheEvents(log)
    store(log, 2)
    batches = events.stream(0)
    snapshot = await anext(batches)
    assert snapshot.sequence_number == log.last_number == 2
    asking = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    store(log, 1, first=7)
    following = await asking
    assert following.sequence_number == 3
    assert [event.WhichOneof("data") for event in following.events] == ["stored"]
