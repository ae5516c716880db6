"""A group that proposes tokens gives the tokens of one that does not: over real ranks, and when one of these dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hetero_client import Completion, Delta, JsonSchema, SamplingParams
from tests.support.draft_models import without_layers
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.prediction_heads import save_with_head
from tests.support.tiny_models import SERVED_SHAPE, save_byte_tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

LINE = "The quick brown fox jumps over the lazy dog and runs home. "
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.7, seed=5, max_tokens=24)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
ASKED: Sequence[tuple[str, SamplingParams]] = (
    (LINE * 4, GREEDY),
    (LINE * 4, SEEDED),
    ("One, two, three, four. " * 6, replace(GREEDY, logprobs=2)),
    (LINE * 3 + "The", replace(GREEDY, stop=("lazy dog and",))),
    ("a b c d e f g " * 5, replace(SEEDED, seed=6)),
    ("def f(x):\n    return x + 1\n\n" * 4, replace(GREEDY, repetition_penalty=1.1, min_tokens=20)),
    ('{"name": "fox", "legs": 4} ' * 5, replace(GREEDY, constraint=JsonSchema(SCHEMA), max_tokens=40)),
    ('{"name": "dog", "legs": 4} ' * 5, replace(SEEDED, constraint=JsonSchema(SCHEMA), max_tokens=40)),
)
TOKENS, BYTES = 80, 256
"""More than any prompt of ASKED has, of the real model and of one whose tokens are bytes."""
SHARES = {"Tensor": {"attention": [2, 1], "mlp": [1, 1], "vocabulary": [1, 1]}, "Layer": {"attention": [1, 1]}}
"""By the mode of placement. Measured ones differ from group to group, and sums with them in their last bits."""


@pytest.fixture(scope="module")
def smaller(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without most of its layers."""
    return without_layers(smollm2, tmp_path_factory.mktemp("smaller"), number=22)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a prediction head that agrees with it now and then."""
    directory = tmp_path_factory.mktemp("headed")
    shape = {**SERVED_SHAPE, "max_position_embeddings": 2048, "head_dim": 8, "eos_token_id": 255}
    save_with_head("deepseek-v3-dense", directory, agrees=True, **shape)
    save_byte_tokenizer(directory)
    return directory


def group(
    folder: Path, kind: str, *, model: Path, mode: str, longest: int, draft: Path | None = None, ranks: str = "Auto"
) -> LocalGroupProcess:
    """`longest`: tokens of the longest of ASKED; every start computes a step of so many. `ranks`: of the draft."""
    speculative = {"kind": kind, **({} if draft is None else {"draft": {"uri": f"file://{draft}", "ranks": ranks}})}
    engine = {"speculative": speculative, "maxNumSeqs": len(ASKED), "maxNumBatchedTokens": longest}
    manifest = write_manifest(folder, model=model, name=kind.lower(), mode=mode, shares=SHARES[mode], engine=engine)
    return LocalGroupProcess(manifest, home=folder / kind)


def told(completion: Completion) -> object:
    logprobs = [each.logprob for each in completion.logprobs]
    return completion.text, completion.token_ids, logprobs, completion.reason


def answers(running: LocalGroupProcess) -> list[object]:
    """One by one, then all at once."""

    def one(asked: tuple[str, SamplingParams]) -> object:
        return told(client.generate_text(asked[0], sampling=asked[1]))

    with running.client() as client:
        alone = [one(asked) for asked in ASKED]
        with ThreadPoolExecutor(len(ASKED)) as pool:
            assert list(pool.map(one, ASKED)) == alone
    return alone


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[object]]:
    """What a group without proposals answers; each is asked once."""

    @cache
    def asked(
        ask: Callable[[LocalGroupProcess], list[object]], *, model: Path, mode: str, longest: int
    ) -> list[object]:
        folder = tmp_path_factory.mktemp("plain")
        with group(folder, "None", model=model, mode=mode, longest=longest) as running:
            return ask(running)

    return asked


@pytest.mark.parametrize(
    ("kind", "mode", "drafted_on", "victim_is"),
    [
        ("NGram", "Tensor", "", "cpu-1"),
        ("NGram", "Layer", "", "cpu-1"),
        ("Auto", "Layer", "", None),
        ("Draft", "Tensor", "CPU", "cpu-0"),
        ("Draft", "Layer", "All", "cpu-1"),
        ("Auto", "Layer", "Auto", None),
    ],
)
def test_text_is_what_it_is_without_proposals_also_of_a_stream_whose_rank_is_killed(
    smollm2: Path,
    smaller: Path,
    plain: Callable[..., list[object]],
    tmp_path: Path,
    kind: str,
    mode: str,
    drafted_on: str,
    victim_is: str | None,
) -> None:
    """The successor of a rank reads its part of the draft model, too."""
    expected = plain(answers, model=smollm2, mode=mode, longest=TOKENS)
    draft = smaller if drafted_on else None
    with group(
        tmp_path, kind, model=smollm2, mode=mode, longest=TOKENS, draft=draft, ranks=drafted_on or "Auto"
    ) as running:
        assert answers(running) == expected
        with running.admin() as admin:
            topology = admin.topology()
        assert topology.speculation.startswith(kind)
        if kind != "Auto":
            assert "proposed tokens accepted" in topology.speculation
        drafting = [any(kernel.startswith("draft=") for kernel in rank.kernels) for rank in topology.ranks]
        if drafted_on != "Auto":
            assert drafting == {"": [False, False], "CPU": [True, False], "All": [True, True]}[drafted_on]
        assert topology.placement is not None
        assert ("draft model on " in topology.placement.reason) == bool(drafted_on)
        if victim_is is not None:
            check_a_stream_over_a_loss(running, victim_is)


def tokens(running: LocalGroupProcess) -> list[object]:
    """One by one."""
    with running.client() as client:
        return [client.generate_text(prompt, sampling=sampling).token_ids for prompt, sampling in ASKED]


@pytest.mark.parametrize(
    ("kind", "mode", "victim_is"), [("MTP", "Tensor", "cpu-0"), ("MTP", "Layer", None), ("Auto", "Tensor", None)]
)
def test_text_is_what_it_is_without_the_model_s_own_head_also_of_a_stream_whose_rank_is_killed(
    headed: Path, plain: Callable[..., list[object]], tmp_path: Path, kind: str, mode: str, victim_is: str | None
) -> None:
    """In mode Layer the last rank has the output head, and sends rank 0 the states.

    Rank 0's successor reads the head, too, and drafts behind a prompt whose states it makes again.
    """
    expected = plain(tokens, model=headed, mode=mode, longest=BYTES)
    with group(tmp_path, kind, model=headed, mode=mode, longest=BYTES) as running:
        assert tokens(running) == expected
        with running.admin() as admin:
            topology = admin.topology()
        assert topology.speculation.startswith("MTP, " if kind == "MTP" else "Auto (MTP), ")
        if kind == "MTP":
            assert "proposed tokens accepted" in topology.speculation
        assert any(kernel.startswith("draft=prediction head of") for kernel in topology.ranks[0].kernels)
        assert not any(kernel.startswith("draft=") for kernel in topology.ranks[1].kernels)
        if victim_is is not None:
            check_a_stream_over_a_loss(running, victim_is)


def check_a_stream_over_a_loss(running: LocalGroupProcess, victim_is: str) -> None:
    """Kill a rank while a stream runs: its tokens stay those of a stream that nothing befell."""
    sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    with running.client() as client:
        expected = client.generate_text(LINE * 4, sampling=sampling)
        received: list[int] = []
        victim: int | None = running.record.processes[victim_is]
        for event in client.generate(LINE * 4, sampling=sampling, cache_salt="again", resume_timeout_s=0):
            if isinstance(event, Delta):
                received += event.token_ids
                if victim is not None and len(received) > 20:
                    os.kill(victim, signal.SIGKILL)
                    victim = None
    assert victim is None
    assert received == list(expected.token_ids)
