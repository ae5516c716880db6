"""Adapters on any layout of ranks give PEFT's logits, in steps that mix several of them with rows of none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.models.decoder_layer import adapter_targets
from tests.support.lora_adapters import SavedAdapter, save_adapter, split_experts
from tests.support.native_compute import op_queue_of
from tests.support.rank_shares import Shares
from tests.support.stages import Stages
from tests.support.tiny_checkpoints import NUM_EXPERTS, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
PROMPT = [17, 3, 150, 88, 9, 61, 199, 42, 5, 120, 33, 71]
LAYOUTS = {
    "one rank": Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,)),
    "tensor": Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136)),
    "a helper and two stages": Shares(
        kv_heads=((8, 0, 0), (0, 8, 0)), mlp_columns=((20, 0, 30), (0, 20, 30)), vocab_rows=(64, 64, 72)
    ),
}
TWO_RANKS = Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136), experts=((2, 4),))
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = [ALL, ("q_proj", "v_proj"), ("k_proj",), ("o_proj", "down_proj"), ("gate_proj",), ("up_proj", "q_proj")]
KERNELS: dict[str, Callable[[], LinearKernel]] = {
    "torch": PlainKernel, "native": lambda: NativeLinear(op_queue_of(2)),
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def adapters(qwen3: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> list[SavedAdapter]:
    """One of each set of modules, with ranks of their own."""
    save = partial(save_adapter, qwen3.directory)
    return [
        save(tmp_path_factory.mktemp("adapter"), modules=modules, rank=3 + 2 * seed, seed=seed, use_rslora=seed == 1)
        for seed, modules in enumerate(TARGETS)
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_each_adapter_have_peft_s_logits_in_one_step(
    qwen3: TinyCheckpoint, adapters: list[SavedAdapter], layout: str, kernel: str
) -> None:
    stages = Stages.load(qwen3.directory, LAYOUTS[layout], num_parts=2, new_kernel=KERNELS[kernel])
    for number, adapter in enumerate(adapters, start=1):
        stages.hold_adapter(number, adapter.directory, KERNELS[kernel])
    expected = [qwen3.logits(PROMPT), *(adapter.logits(PROMPT) for adapter in adapters)]
    for one, other in pairwise(expected):
        assert (one - other).abs().max() > 100 * TOLERANCE, "the adapters change what they are to change"
    sequences = [stages.start(PROMPT, adapter=number) for number in range(len(expected))]
    last = len(PROMPT) - 1
    prefill = stages.logits(*((sequence, last) for sequence in sequences))
    decode = stages.logits(*((sequence, 1) for sequence in sequences))
    for number, logits in enumerate(expected):
        got = torch.cat([prefill[number * last : (number + 1) * last], decode[number : number + 1]])
        assert (got - logits).abs().max() <= TOLERANCE, (number, (got - logits).abs().max())


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_are_lent_in_slices_keep_their_adapters(
    qwen3: TinyCheckpoint, adapters: list[SavedAdapter], kernel: str
) -> None:
    row_bytes = 4 * qwen3.reference.config.hidden_size
    stages = Stages.load(
        qwen3.directory, LAYOUTS["a helper and two stages"], link_bytes=10 * row_bytes, new_kernel=KERNELS[kernel]
    )
    stages.hold_adapter(1, adapters[0].directory, KERNELS[kernel])
    got = stages.logits(*((stages.start(PROMPT, adapter=number), len(PROMPT)) for number in (0, 1)))
    expected = torch.cat([qwen3.logits(PROMPT), adapters[0].logits(PROMPT)])
    assert (got - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_adapter_that_was_dropped_or_replaced_leaves_nothing_behind(
    qwen3: TinyCheckpoint, adapters: list[SavedAdapter], kernel: str
) -> None:
    stages = Stages.load(qwen3.directory, LAYOUTS["tensor"], new_kernel=KERNELS[kernel])
    before = stages.logits((stages.start(PROMPT), len(PROMPT)))
    stages.hold_adapter(7, adapters[0].directory, KERNELS[kernel])
    stages.hold_adapter(7, adapters[2].directory, KERNELS[kernel])
    got = stages.logits((stages.start(PROMPT, adapter=7), len(PROMPT)))
    assert (got - adapters[2].logits(PROMPT)).abs().max() <= TOLERANCE
    for decoder in stages.decoders:
        decoder.drop_adapter(7)
    assert torch.equal(stages.logits((stages.start(PROMPT), len(PROMPT))), before)


@pytest.mark.parametrize("variant", ["glm4", "llama-biased", "qwen3.5", "gemma4-readers", "gemma4-moe", "gpt-oss"])
def test_models_of_other_kinds_take_adapters_of_all_their_modules(tmp_path: Path, variant: str) -> None:
    """Fused gates and interleaved rotations, biases, gated attention, layers without keys, experts beside."""
    checkpoint = save_tiny(variant, tmp_path / "model")
    targets = adapter_targets(ModelConfig.from_directory(checkpoint.directory))
    modules = sorted({name.rpartition(".")[2] for name in targets})
    adapter = save_adapter(checkpoint.directory, tmp_path / "adapter", modules=modules)
    stages = Stages.load(checkpoint.directory, TWO_RANKS)
    stages.hold_adapter(1, adapter.directory)
    got = stages.logits((stages.start(PROMPT, adapter=1), len(PROMPT)))
    assert (got - adapter.logits(PROMPT)).abs().max() <= TOLERANCE
    assert (got - checkpoint.logits(PROMPT)).abs().max() > 100 * TOLERANCE


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SLICES = Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136), expert_slices=(3, 7))


@pytest.mark.parametrize("shares", [TWO_RANKS, SLICES], ids=["whole", "sliced"])
@pytest.mark.parametrize("variant", ["qwen3-moe-some-dense", "glm4-moe-grouped", "qwen3-next"])
def test_experts_take_adapters_of_their_stacks_and_of_themselves(tmp_path: Path, variant: str, shares: Shares) -> None:
    """Also beside experts of all tokens, with and without a gate. test_adapter_commands.py has native ranks."""
    checkpoint = save_tiny(variant, tmp_path / "model")
    save = partial(save_adapter, checkpoint.directory, modules=("o_proj",), rank=3)
    both = save(tmp_path / "both", target_parameters=EXPERTS)
    downs = save(tmp_path / "downs", target_parameters=EXPERTS[1:], seed=1)
    plain = save(tmp_path / "plain", seed=2)
    split = split_experts(both.directory, tmp_path / "split", num_experts=NUM_EXPERTS)
    stages = Stages.load(checkpoint.directory, shares)
    for number, directory in enumerate((both.directory, downs.directory, plain.directory, split), start=1):
        stages.hold_adapter(number, directory)
    sequences = [stages.start(PROMPT, adapter=number) for number in range(5)]
    last = len(PROMPT) - 1
    prefill = stages.logits(*((sequence, last) for sequence in sequences))
    decode = stages.logits(*((sequence, 1) for sequence in sequences))
    sources: tuple[TinyCheckpoint | SavedAdapter, ...] = (checkpoint, both, downs, plain, both)
    for number, source in enumerate(sources):
        got = torch.cat([prefill[number * last : (number + 1) * last], decode[number : number + 1]])
        expected = source.logits(PROMPT)
        assert (got - expected).abs().max() <= TOLERANCE, (number, (got - expected).abs().max())
        assert number == 0 or (expected - checkpoint.logits(PROMPT)).abs().max() > 100 * TOLERANCE
