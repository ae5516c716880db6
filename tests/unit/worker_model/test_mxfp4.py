"""GPT-OSS as it is published, in safetensors and in GGUF: experts of 4-bit floats, read as exactly those numbers."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import StackEntry, TensorSlice
from tests.support.bytes_read import counting_reads
from tests.support.gguf_models import write_gguf_model
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.resident_weights import resident_weights
from tests.support.tiny_checkpoints import NUM_EXPERTS, TinyCheckpoint, edit_config, save_tiny

pytestmark = pytest.mark.unit

HIDDEN, WIDTH, GROUP = 64, 96, 32
FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""By their four bits."""
UNEVEN = Shares(kv_heads=((5, 3),), mlp_columns=((0, 1),), vocab_rows=(64, 136), experts=((1, 5),))
SLICES = Shares(kv_heads=((5, 3),), mlp_columns=((0, 1),), vocab_rows=(64, 136), expert_slices=(1, 2))
"""One group of an expert's columns, and two."""
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Random bits for all experts, in the files and in the reference."""
    directory = tmp_path_factory.mktemp("mxfp4")
    saved = save_tiny("gpt-oss", directory, hidden_size=HIDDEN, intermediate_size=WIDTH)
    reference, path = copy.deepcopy(saved.reference), directory / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(0)
    for name, parameter in reference.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = parameter.shape
            shape = experts, outputs, inputs // GROUP
            blocks = torch.randint(256, (*shape, GROUP // 2), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
            with torch.no_grad():
                parameter.copy_(dequantised(blocks, exponents).transpose(1, 2))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    save_file(tensors, path)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped})
    return TinyCheckpoint(directory, reference)


@pytest.fixture(scope="module")
def in_gguf(checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """The same numbers in a GGUF file."""
    floats, directory = tmp_path_factory.mktemp("floats"), tmp_path_factory.mktemp("gguf")
    shutil.copy(checkpoint.directory / "config.json", floats)
    tensors = {name: each.contiguous() for name, each in checkpoint.reference.state_dict().items()}
    save_file(tensors, floats / "model.safetensors")
    write_gguf_model(
        floats,
        directory / "tiny.gguf",
        "gpt-oss",
        kind=lambda name, _: "MXFP4" if name.endswith("_exps.weight") else "F32",
    )
    return TinyCheckpoint(directory, checkpoint.reference)


@pytest.fixture(params=["safetensors", "gguf"])
def published(request: pytest.FixtureRequest, checkpoint: TinyCheckpoint, in_gguf: TinyCheckpoint) -> TinyCheckpoint:
    """Both."""
    return checkpoint if request.param == "safetensors" else in_gguf


def dequantised(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32 [experts, out, in], value by value as the format says."""
    values = torch.empty(*blocks.shape[:3], GROUP)
    values[..., 0::2], values[..., 1::2] = FLOATS[(blocks % 16).int()], FLOATS[(blocks // 16).int()]
    return (values * 2.0 ** (exponents.float() - 127).unsqueeze(-1)).flatten(2)


def test_this_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 10, 2, GROUP // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(110, 130, (3, 10, 2), generator=generator, dtype=torch.uint8)
    theirs: torch.Tensor = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    assert torch.equal(dequantised(blocks, exponents), theirs.transpose(1, 2))


def test_an_expert_is_read_as_exactly_its_numbers(published: TinyCheckpoint) -> None:
    parameter = published.reference.model.layers[0].mlp.experts.gate_up_proj
    for half in range(2):
        part = TensorSlice(GATE_UP, (WIDTH, HIDDEN), entry=StackEntry(3, NUM_EXPERTS, first=half, step=2))
        with Checkpoint(published.directory) as opened:
            matrix = opened.read_quantized(part)
        assert matrix.format == WeightFormat(4, GROUP, is_float=True)
        assert torch.equal(matrix.dequantized(), parameter[3, :, half::2].T)


def test_of_a_stack_a_rank_reads_its_rows_and_groups_only(published: TinyCheckpoint) -> None:
    entry = StackEntry(3, NUM_EXPERTS, first=1, step=2)
    part = TensorSlice(GATE_UP, (WIDTH, HIDDEN), rows=UnitRange(32, 48), columns=UnitRange(32, 64), entry=entry)
    with counting_reads() as count, Checkpoint(published.directory) as opened:
        opened.read_quantized(part)
        assert count() == 16 * (GROUP // 2 + 1)


@pytest.mark.parametrize("shares", [UNEVEN, SLICES], ids=["whole", "slices"])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_logits_are_transformers(published: TinyCheckpoint, shares: Shares, *, native: bool) -> None:
    """Native kernels round rows to whole numbers, too, so theirs are only nearly the same."""
    builder = PlanBuilder(RankGroup(published.directory, shares, native=native))
    builder.start(0, [7, 150, 3, 88, 199, 0, 42])
    for _ in range(3):
        expected = published.logits(builder.sequences[0].tokens)[-1]
        builder.schedule(0)
        logits = builder.run().logits[0]
        if native:
            assert torch.corrcoef(torch.stack([logits, expected]))[0, 1] >= 0.999
        else:
            assert (logits - expected).abs().max() <= 1e-4


def test_memory_is_that_of_four_bits(published: TinyCheckpoint) -> None:
    config = ModelConfig.from_directory(published.directory)
    assert config.weights.layers is None
    assert config.weights.of_experts.layers == WeightFormat(4, GROUP, is_float=True)


def test_a_rank_takes_the_same_memory_of_both(checkpoint: TinyCheckpoint, in_gguf: TinyCheckpoint) -> None:
    groups = (RankGroup(each.directory, UNEVEN) for each in (checkpoint, in_gguf))
    of_safetensors, of_gguf = ([resident_weights(request) for request in group.requests] for group in groups)
    assert of_safetensors == of_gguf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.full((NUM_EXPERTS, 2 * WIDTH, 2), 200, dtype=torch.uint8)}, "too large for float16"),
        ({"scales": torch.zeros(NUM_EXPERTS, 2 * WIDTH, 3, dtype=torch.uint8)}, "has shape"),
        ({"scales": torch.zeros(NUM_EXPERTS, 2 * WIDTH, 2)}, "is stored as F32, which must be U8"),
        ({"blocks": torch.zeros(NUM_EXPERTS, 2 * WIDTH, 2, 8, dtype=torch.uint8)}, "has shape"),
    ],
    ids=["exponents", "groups", "kind", "bytes"],
)
def test_damaged_experts_are_named(
    checkpoint: TinyCheckpoint, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tensors = load_file(checkpoint.directory / "model.safetensors")
    damaged = {f"{GATE_UP}_{name}": each for name, each in change.items()}
    save_file({**tensors, **damaged}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((checkpoint.directory / "config.json").read_text())))
    part = TensorSlice(GATE_UP, (WIDTH, HIDDEN), entry=StackEntry(0, NUM_EXPERTS, step=2))
    with Checkpoint(tmp_path) as opened, pytest.raises(ModelError, match=f"experts.gate_up_proj_.*{message}"):
        opened.read_quantized(part)
