"""A group whose tokens want one rank's experts: they are spread, stay spread, and the text stays what it was."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.sharding import UnitRange
from hetero_client import AdminClient, Delta, HeteroClient, SamplingParams
from hetero_client.errors import ClientError, WrongStateError
from tests.support.local_group import LocalGroupProcess, wait_for, write_manifest
from tests.support.reference import Reference
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = tuple(range(3, 43))
HALVES = {"attention": [1, 1], "mlp": [1, 1], "vocabulary": [1, 1]}
NUM_LAYERS, NUM_WANTED = 2, 3
NUM_STREAMED = 320
"""Tokens of each of several requests."""


def save_lopsided_model(directory: Path) -> Path:
    """Experts that take most of a step, and routers that choose of the first three, which are on rank 0, every time.

    All embeddings have one large component in common, which the routers' first rows look at.
    """
    save_tiny_model(
        directory, "qwen3-moe", num_hidden_layers=NUM_LAYERS, num_experts_per_tok=NUM_WANTED, moe_intermediate_size=8192
    )
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 8.0
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.post_attention_layernorm.weight"].abs_()
        router = weights[f"{prefix}.mlp.gate.weight"]
        router[:, 0] = torch.tensor([1.5] * NUM_WANTED + [-1.5] * (len(router) - NUM_WANTED))
        for name in weights:
            if name.startswith(prefix) and name.endswith(("o_proj.weight", "down_proj.weight")):
                weights[name].mul_(0.02)  # what layers add must not drown it
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def generate(client: HeteroClient) -> tuple[int, ...]:
    return tuple(client.generate_text(PROMPT, sampling=GREEDY).token_ids)


def test_experts_that_are_wanted_are_spread_and_stay_spread(tmp_path: Path) -> None:
    model = save_lopsided_model(tmp_path / "model")
    reference = Reference.from_directory(model)
    manifest = write_manifest(tmp_path, model=model, shares=HALVES, experts="Whole", max_model_len=None)
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client, group.admin() as admin:
        assert reference.disagreements(PROMPT, generate(client)) == []
        before = {rank.rank: rank.weight_bytes for rank in admin.topology().ranks}

        placed = admin.place_experts()
        assert placed.counted_tokens == len(PROMPT) + 23
        assert placed.moved_experts == 2 * NUM_LAYERS, "one of three goes to the other rank, for one that nobody wants"
        assert placed.step_s_after < placed.step_s_before
        assert reference.disagreements(PROMPT, generate(client)) == []
        assert {rank.rank: rank.weight_bytes for rank in admin.topology().ranks} == before
        assert admin.place_experts().moved_experts == 0

        lose_a_rank(group, admin)
        assert reference.disagreements(PROMPT, generate(client)) == []
        again = admin.place_experts()
        assert again.counted_tokens > 0
        assert again.moved_experts == 0, "the next epoch went on with the experts as they had been placed"
        assert admin.topology().ranks[1].load_s == 0, "the other rank kept its weights, those that moved too"


class TimedStream:
    """A request on a thread of its own, and when its tokens came."""

    def __init__(self, client: HeteroClient, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self._thread = threading.Thread(target=self._read, args=(client,))
        self._thread.start()

    def _read(self, client: HeteroClient) -> None:
        for event in client.generate(self.prompt, sampling=replace(GREEDY, max_tokens=NUM_STREAMED)):
            if isinstance(event, Delta):
                self.tokens += event.token_ids
                self.times_s.append(time.monotonic())

    def end(self) -> None:
        self._thread.join(timeout=300)
        assert len(self.tokens) == NUM_STREAMED

    def longest_gap_s(self, *, begin_s: float, end_s: float) -> float:
        """Longest time without a token that ends within this time."""
        return max(later - sooner for sooner, later in pairwise(self.times_s) if begin_s < later < end_s)


def test_experts_change_places_under_eight_streams(tmp_path: Path) -> None:
    """No stream ends or waits, and text is the reference's but for ties."""
    model = save_lopsided_model(tmp_path / "model")
    reference = Reference.from_directory(model)
    engine = {"maxNumSeqs": 8}
    manifest = write_manifest(tmp_path, model=model, shares=HALVES, experts="Whole", engine=engine, max_model_len=None)
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client, group.admin() as admin:
        streams = [TimedStream(client, tuple(range(3 + number, 43 + number))) for number in range(8)]
        wait_for(lambda: all(len(stream.tokens) > 10 for stream in streams), 60, group.describe)
        running_s = time.monotonic()
        wait_for(lambda: all(len(stream.tokens) > NUM_STREAMED // 3 for stream in streams), 60, group.describe)
        began_s = time.monotonic()
        placed = admin.place_experts()
        ended_s = time.monotonic()
        assert placed.moved_experts == 2 * NUM_LAYERS
        assert all(len(stream.tokens) < NUM_STREAMED for stream in streams), "they run on"
        for stream in streams:
            stream.end()
            assert reference.disagreements(stream.prompt, stream.tokens) == []
        before_s = max(stream.longest_gap_s(begin_s=running_s, end_s=began_s) for stream in streams)
        while_s = max(stream.longest_gap_s(begin_s=began_s, end_s=ended_s) for stream in streams)
        print(f"places changed in {ended_s - began_s:.3f} s; longest gap {while_s:.4f} s, before {before_s:.4f} s")
        assert while_s <= 2 * before_s + 0.1
        assert admin.topology().epoch == 1


def test_a_rank_killed_while_experts_change_places_heals_into_one_placement(tmp_path: Path) -> None:
    model = save_lopsided_model(tmp_path / "model")
    reference = Reference.from_directory(model)
    manifest = write_manifest(tmp_path, model=model, shares=HALVES, experts="Whole", max_model_len=None)
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client, group.admin() as admin:
        streams = [TimedStream(client, tuple(range(3 + number, 43 + number))) for number in range(4)]
        wait_for(lambda: all(len(stream.tokens) > 10 for stream in streams), 60, group.describe)

        def place() -> None:
            with suppress(ClientError):  # the epoch ends below it
                admin.place_experts()

        placing = threading.Thread(target=place)
        placing.start()
        time.sleep(0.03)
        lose_a_rank(group, admin)
        placing.join(timeout=60)
        for stream in streams:
            stream.end()
            assert reference.disagreements(stream.prompt, stream.tokens) == []
        admin.place_experts()
        assert admin.place_experts().moved_experts == 0
        assert reference.disagreements(PROMPT, generate(client)) == []


def test_slices_of_experts_are_the_same_work_for_all_and_survive_a_rank(tmp_path: Path) -> None:
    """The workload is a request at a time, for which the solver chooses slices by itself."""
    model = save_lopsided_model(tmp_path / "model")
    reference = Reference.from_directory(model)
    manifest = write_manifest(tmp_path, model=model, shares=HALVES, max_model_len=None)
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client, group.admin() as admin:
        first, second = admin.topology().ranks
        columns = [rank.expert_columns for rank in (first, second)]
        assert [part.size for part in columns if part is not None] == [4096, 4096]
        assert first.experts == second.experts == UnitRange(0, 6)
        placement = admin.topology().placement
        assert placement is not None
        assert "experts in slices" in placement.reason
        assert reference.disagreements(PROMPT, generate(client)) == []
        assert admin.place_experts().moved_experts == 0, "all ranks do the same already"

        lose_a_rank(group, admin)
        assert reference.disagreements(PROMPT, generate(client)) == []
        again = admin.topology().ranks
        assert [rank.expert_columns for rank in again] == columns
        assert again[1].load_s == 0, "the other rank kept its slices"


def lose_a_rank(group: LocalGroupProcess, admin: AdminClient) -> None:
    epoch = admin.topology().epoch
    os.kill(group.record.processes["cpu-0"], signal.SIGKILL)
    group.wait_ready_again(after_epoch=epoch)


def test_a_model_without_experts_is_told_so(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3")
    manifest = write_manifest(tmp_path, model=model, max_model_len=None)
    with (
        LocalGroupProcess(manifest, home=tmp_path / "home") as group,
        group.admin() as admin,
        pytest.raises(WrongStateError, match="needs a model of experts"),
    ):
        admin.place_experts()
