"""GPU ranks and CPU ranks of one real group serve what transformers computes; the GPUs are played by the host.

Everything is real but the device: gateway, launcher, rank processes, a device group beside the group of all ranks, and
the exchange in host memory between the two kinds.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetero_client import Completion, HeteroClient, SamplingParams
from hetero_client.admin import AdminClient
from hetero_client.messages import CacheLayout
from tests.support.local_group import REPOSITORY, LocalGroupProcess, shared_segments, wait_for
from tests.support.prompts import PROMPTS
from tests.support.pseudo_gpu_up import MODULE, write_mixed_manifest
from tests.support.reference import Reference
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = tuple(range(3, 120))
LENGTHS = (1, 16, 17, 117, 110, 100)
ENGINE = {"maxNumBatchedTokens": 50, "kvCacheMemoryBytes": "750Ki", "maxNumSeqs": 8}
"""Where a rank has 4 to 6 KV heads, 20 to 31 blocks of 16: not all of these sequences fit at a time."""

MIXED_VARIANTS: dict[str, dict[str, float]] = {
    "glm4-moe": {}, "gpt-oss": {}, "minimax-m2": {}, "deepseek-v3": {"head_dim": 8}, "glm4-moe-lite": {"head_dim": 8},
    "gemma4-moe": {}, "gemma4-readers": {"vocab_size_per_layer_input": 320}, "qwen3-next": {"initializer_range": 0.15},
    "qwen3.5": {"initializer_range": 0.15}, "qwen3.5-moe": {"initializer_range": 0.15}, "smollm3": {}, "glm4": {},
    "mistral": {}, "llama": {},
}  # fmt: skip
"""With changes of their configuration: DeepSeek-V3's head_dim is that of what is rotated."""
EVERY_PATH_VARIANT = "qwen3-moe-some-dense"


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of each kind, and how the model is spread over them."""

    gpus: int
    cpus: int
    shares: dict[str, list[int]]
    heads: list[int]
    """KV heads of the first layer that each rank is to have."""
    mode: str = "Tensor"


LAYOUTS = {
    "CPU ranks on MLP only": Layout(
        2, 2, {"attention": [5, 3, 0, 0], "mlp": [0, 1, 1, 3], "vocabulary": [1, 2, 0, 0]}, [5, 3, 0, 0]
    ),
    "CPU ranks with heads": Layout(
        2, 2, {"attention": [3, 0, 4, 1], "mlp": [0, 2, 1, 1], "vocabulary": [0, 1, 1, 3]}, [3, 0, 4, 1]
    ),
    "1 GPU + 3 CPU": Layout(
        1, 3, {"attention": [6, 0, 2, 0], "mlp": [1, 2, 1, 1], "vocabulary": [1, 0, 0, 0]}, [6, 0, 2, 0]
    ),
    "layers on GPU and CPU": Layout(2, 1, {"attention": [1, 1, 1], "mlp": [1, 1, 1]}, [8, 0, 0], mode="Layer"),
}


def mixed_group(folder: Path, model: Path, layout: Layout, **changes: Any) -> LocalGroupProcess:
    manifest = write_mixed_manifest(
        folder, model=model, gpus=layout.gpus, cpus=layout.cpus, shares=layout.shares, mode=layout.mode, **changes
    )
    return LocalGroupProcess(manifest, home=folder / "home", module=MODULE, environment={"PYTHONPATH": str(REPOSITORY)})


def complete(client: HeteroClient, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """All at once: chunks of the long ones go with the others' decoding."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: client.generate_text(tuple(prompt), sampling=GREEDY), prompts))


def check(client: HeteroClient, reference: Reference) -> None:
    prompts = [PROMPT[:length] for length in LENGTHS]
    completions = complete(client, prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == GREEDY.max_tokens
        assert reference.disagreements(prompt, completion.token_ids) == []


def check_stream_over_a_loss(
    group: LocalGroupProcess, client: HeteroClient, reference: Reference, lost: str, *, max_tokens: int
) -> None:
    """Kill a rank while a stream runs: its tokens stay the reference's, and only that rank gets another process."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    before, tokens = group.record.processes, list[int]()
    for event in client.generate(PROMPT[:16], sampling=sampling, resume_timeout_s=0):
        if event_tokens := getattr(event, "token_ids", ()):
            tokens += event_tokens
            if len(tokens) - len(event_tokens) < 20 <= len(tokens):
                os.kill(before[lost], signal.SIGKILL)
    wait_for(lambda: group.record.processes[lost] != before[lost], 30, group.describe)
    after = group.record.processes
    assert len(tokens) == max_tokens
    assert reference.disagreements(PROMPT[:16], tokens) == []
    survivors = [name for name in before if name != lost]
    assert {name: after[name] for name in survivors} == {name: before[name] for name in survivors}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_mixed_group_equals_transformers_on_every_path(tmp_path: Path, layout: Layout) -> None:
    """Chunked and mixed steps, a prefix hit, preemption, another cache, and both levels of sleep."""
    model = save_tiny_model(tmp_path / "model", EVERY_PATH_VARIANT)
    reference = Reference.from_directory(model)
    with mixed_group(tmp_path, model, layout, engine=ENGINE, max_model_len=160) as group, group.client() as client:
        with group.admin() as admin:
            _check_topology(admin, layout)
        check(client, reference)
        again = [client.generate_text(PROMPT, sampling=GREEDY) for _ in range(2)]
        assert again[1].usage.cached_tokens == 112
        assert again[1].token_ids == again[0].token_ids
        with group.admin() as admin:
            for level in (1, 2):
                admin.sleep(level)
                admin.wake_up()
                check(client, reference)
            admin.reset_cache(layout=CacheLayout.CONTIGUOUS)
            check(client, reference)
    assert shared_segments() == set()


@pytest.mark.parametrize(
    ("name", "ranks"), [("1 GPU + 3 CPU", "CPU"), ("layers on GPU and CPU", "All"), ("CPU ranks on MLP only", "GPU")]
)
def test_a_draft_model_on_other_ranks_than_the_model_is_right_and_changes_no_token(
    tmp_path: Path, name: str, ranks: str
) -> None:
    """The model drafts for itself: what is wrong are near ties, and drafts behind a token that ends nothing."""
    model = save_tiny_model(tmp_path / "model", "llama", initializer_range=0.15)
    draft = {"uri": f"file://{model}", "ranks": ranks}
    engine = {
        "maxNumBatchedTokens": 50,
        "kvCacheMemoryBytes": "4Mi",
        "speculative": {"kind": "Draft", "draft": draft, "maxTokens": 4},
    }
    with (
        mixed_group(tmp_path, model, LAYOUTS[name], engine=engine, max_model_len=160) as group,
        group.client() as client,
    ):
        check(client, Reference.from_directory(model))
        with group.admin() as admin:
            topology = admin.topology()
        drafting = [rank.rank for rank in topology.ranks if any(kernel.startswith("draft=") for kernel in rank.kernels)]
        gpus, everyone = LAYOUTS[name].gpus, len(topology.ranks)
        assert drafting == {"CPU": [gpus], "GPU": [0], "All": list(range(everyone))}[ranks]
        accepted, proposed = map(int, re.findall(r"(\d+) of (\d+) proposed tokens accepted", topology.speculation)[0])
        assert accepted > 0.8 * proposed > 40
    assert shared_segments() == set()


def check_cached_and_woken(group: LocalGroupProcess, client: HeteroClient, reference: Reference, *, level: int) -> None:
    """A prefix hit changes no token, and neither does sleep."""
    again = [client.generate_text(PROMPT, sampling=GREEDY) for _ in range(2)]
    assert again[1].usage.cached_tokens == 112
    assert again[1].token_ids == again[0].token_ids
    with group.admin() as admin:
        admin.sleep(level)
        admin.wake_up()
    check(client, reference)


@pytest.mark.parametrize("variant", MIXED_VARIANTS)
def test_models_that_do_not_fit_a_gpu_are_served_by_a_mixed_group(tmp_path: Path, variant: str) -> None:
    """Chunked and mixed steps, a prefix hit, wake-up from sleep, and a rank that is killed while it streams."""
    model = save_tiny_model(tmp_path / "model", variant, **MIXED_VARIANTS[variant])
    layout = LAYOUTS["1 GPU + 3 CPU"]
    reference = Reference.from_directory(model)
    with mixed_group(tmp_path, model, layout, engine=ENGINE, max_model_len=160) as group, group.client() as client:
        check(client, reference)
        check_cached_and_woken(group, client, reference, level=1)
        check_stream_over_a_loss(group, client, reference, "cpu-1", max_tokens=64)
    assert shared_segments() == set()


def _check_topology(admin: AdminClient, layout: Layout) -> None:
    ranks = admin.topology().ranks
    assert [rank.pool for rank in ranks] == ["gpu"] * layout.gpus + ["cpu"] * layout.cpus
    assert [rank.device.startswith("pseudo GPU") for rank in ranks] == [rank.pool == "gpu" for rank in ranks]
    if layout.mode == "Tensor":
        assert [rank.kv_heads.size for rank in ranks if rank.kv_heads is not None] == layout.heads
    assert ["attention=paged-torch" in rank.kernels for rank in ranks] == [rank.pool == "gpu" for rank in ranks]


def test_cpu_ranks_that_own_nothing_are_idle_beside_gpu_ranks(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    layout = Layout(2, 2, {}, [], mode="GpuOnly")
    # Devices with gaps: ranks are on cuda:1 and cuda:6.
    with mixed_group(tmp_path, model, layout, devices=[1, 6]) as group, group.client() as client:
        with group.admin() as admin:
            ranks = admin.topology().ranks
        check(client, Reference.from_directory(model))
    assert [rank.device for rank in ranks[:2]] == ["pseudo GPU 1", "pseudo GPU 6"]
    head_rows = [rank.head_rows.size for rank in ranks if rank.head_rows is not None]
    assert (sum(head_rows[:2]), head_rows[2:]) == (320, [0, 0])
    assert [rank.kv_bytes for rank in ranks[2:]] == [0, 0]


@pytest.mark.parametrize("lost", ["gpu-0", "cpu-1"])
def test_a_stream_survives_the_loss_of_a_rank_of_either_kind(tmp_path: Path, lost: str) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    with mixed_group(tmp_path, model, LAYOUTS["CPU ranks on MLP only"]) as group, group.client() as client:
        check_stream_over_a_loss(group, client, Reference.from_directory(model), lost, max_tokens=300)


def test_real_prompts_over_two_gpus_and_two_cpus_equal_transformers(tmp_path: Path, smollm2: Path) -> None:
    layout = Layout(2, 2, {"attention": [2, 1, 0, 0], "mlp": [3, 2, 1, 2], "vocabulary": [1, 1, 0, 0]}, [2, 1, 0, 0])
    reference = Reference.from_directory(smollm2)
    prompts = PROMPTS[:6]
    engine = {"maxNumBatchedTokens": 256}
    with mixed_group(tmp_path, smollm2, layout, engine=engine) as group, group.client() as client:
        with group.admin() as admin:
            ranks = admin.topology().ranks
        assert ["steps=recorded" in rank.kernels for rank in ranks] == [False, False, True, True]
        tokens = [client.tokenize(prompt) for prompt in prompts]
        completions = complete(client, tokens)
    for prompt_ids, completion in zip(tokens, completions, strict=True):
        assert reference.disagreements(prompt_ids, completion.token_ids) == []


def test_long_prompts_stream_experts_to_the_gpu_also_after_ranks_were_lost(tmp_path: Path) -> None:
    """Chunks of 50 tokens stream; what is shorter and what decodes does not. A rank of each kind is killed."""
    model = save_tiny_model(tmp_path / "model", "qwen3-moe-some-dense")
    reference = Reference.from_directory(model)
    layout = Layout(1, 2, {"attention": [1, 0, 0], "mlp": [1, 2, 3], "vocabulary": [1, 0, 0]}, [8, 0, 0])
    engine = {**ENGINE, "expertStreaming": 20}
    with mixed_group(tmp_path, model, layout, engine=engine, max_model_len=160) as group, group.client() as client:
        with group.admin() as admin:
            placement = admin.topology().placement
        assert placement is not None
        assert "come to the GPU in steps of 20 tokens or more" in placement.reason
        check(client, reference)
        for lost in ("cpu-1", "gpu-0"):
            check_stream_over_a_loss(group, client, reference, lost, max_tokens=40)
            check(client, reference)
        check_cached_and_woken(group, client, reference, level=2)
        logs = [log.read_text() for log in group._run.path.glob("*.log")]
        assert not any("are streamed" in log for log in logs), "some rank could not"
    assert shared_segments() == set()
