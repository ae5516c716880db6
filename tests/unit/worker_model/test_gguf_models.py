"""Models in GGUF, without config.json: their logits equal those of the checkpoint that they were made of."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufHeader
from hetero_api.gguf_names import GGUF_ARCHITECTURES
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_client.errors import ModelStoreError
from hetero_client.model_store.store import check_model_directory
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.content import checkpoint_files
from hetero_worker.checkpoints.store import StackEntry, TensorSlice
from tests.support.gguf_models import write_gguf_model
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE: Final = 1e-4
UNEVEN: Final = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),))
PROMPT: Final = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]
MODELS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("llama-tied", "llama", {}),
    "llama with llama3's rotation": ("llama3-rope", "llama", {}),
    "llama with biases": ("llama-biased", "llama", {}),
    "mixtral": ("mixtral", "llama", {}),
    "mistral3": ("mistral", "mistral3", {}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3-moe", "qwen3moe", {}),
    "gemma2": ("gemma2", "gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3", "gemma3", {"query_pre_attn_scalar": 8, "sliding_window_pattern": 6, "num_hidden_layers": 7}),
    "smollm3": ("smollm3", "smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}),
    "glm4": ("glm4", "glm4", {}),
    "glm4moe": ("glm4-moe-grouped", "glm4moe", {"first_k_dense_replace": 1}),
    "gpt-oss": ("gpt-oss", "gpt-oss", {}),
    "minimax-m2": ("minimax-m2", "minimax-m2", {}),
    "deepseek2": ("deepseek-v3", "deepseek2", {}),
    "qwen3next": ("qwen3-next", "qwen3next", {}),
    "qwen35": ("qwen3.5", "qwen35", {"linear_num_value_heads": 24}),
    "qwen35moe": ("qwen3.5-moe", "qwen35moe", {}),
    "gemma4": ("gemma4", "gemma4", {}),
    "gemma4 with values": ("gemma4-values", "gemma4", {"attention_bias": False}),
    "gemma4 with experts": ("gemma4-moe", "gemma4", {}),
    "gemma4 with inputs of each layer": ("gemma4-inputs", "gemma4", {}),
    "gemma4 with readers": ("gemma4-readers", "gemma4", {}),
}
"""Variants of tiny_checkpoints, their names in GGUF, and what llama.cpp has no field for."""


def _in_gguf(tmp_path: Path, name: str, **options: Any) -> TinyCheckpoint:
    variant, architecture, changes = MODELS[name]
    source = save_tiny(variant, tmp_path / "source", **changes)
    (tmp_path / "gguf").mkdir()
    write_gguf_model(source.directory, tmp_path / "gguf" / "tiny.gguf", architecture, **options)
    return TinyCheckpoint(tmp_path / "gguf", source.reference)


def _tensors(model: TinyCheckpoint) -> Collection[str]:
    return GgufHeader.read(model.directory / "tiny.gguf").tensors


def _check_logits(model: TinyCheckpoint) -> None:
    builder = PlanBuilder(RankGroup(model.directory, UNEVEN))
    builder.start(3, PROMPT)
    for _ in range(3):
        expected = model.logits(builder.sequences[3].tokens)[-1]
        builder.schedule(3)
        assert (builder.run().logits[0] - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_alone_is_the_model_that_it_was_made_of(tmp_path: Path, name: str) -> None:
    model = _in_gguf(tmp_path, name)
    _check_logits(model)
    found, source = (ModelConfig.from_directory(each).sliding for each in (model.directory, tmp_path / "source"))
    assert (found and (found.window, found.layers)) == (source and (source.window, source.layers))


def test_every_architecture_is_tested() -> None:
    assert {architecture for _, architecture, _ in MODELS.values()} == set(GGUF_ARCHITECTURES)


def test_latent_attention_of_earlier_files_is_whole(tmp_path: Path) -> None:
    _check_logits(_in_gguf(tmp_path, "deepseek2", whole_heads=True))


def test_scaled_rotations_of_latent_attention_scale_its_scores(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    source = save_tiny("deepseek-v3", tmp_path / "source", rope_parameters=rope)
    (tmp_path / "gguf").mkdir()
    write_gguf_model(source.directory, tmp_path / "gguf" / "tiny.gguf", "deepseek2")
    _check_logits(TinyCheckpoint(tmp_path / "gguf", source.reference))


def test_the_parts_of_a_split_model_are_one(tmp_path: Path) -> None:
    model = _in_gguf(tmp_path, "qwen3moe", split_max_tensors=9)
    parts = sorted(path.name for path in model.directory.iterdir())
    assert len(parts) > 3
    assert parts[0] == f"tiny-00001-of-{len(parts):05}.gguf"
    _check_logits(model)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    directory = _in_gguf(tmp_path, "qwen3", split_max_tensors=9).directory
    first, second, *_, last = sorted(directory.iterdir())
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelError, match=rf"1 of the \d parts of a split GGUF are missing, {second.name} for one"):
        ModelConfig.from_directory(directory)
    shutil.copy(last, second)
    with pytest.raises(ModelError, match=rf"{second.name}: is part \d of \d by split.no and split.count, and part 1"):
        ModelConfig.from_directory(directory)
    second.write_bytes(whole)
    (directory / "other.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match="holds several models in GGUF"):
        ModelConfig.from_directory(directory)
    (directory / "other.gguf").rename(directory / "mmproj-F16.gguf")  # a vision part, which is left aside
    assert ModelConfig.from_directory(directory).num_layers == 3
    first.rename(tmp_path / "alone.gguf")
    for path in directory.iterdir():
        path.unlink()
    (tmp_path / "alone.gguf").rename(directory / "alone.gguf")
    with pytest.raises(ModelError, match=r"alone.gguf: is part 0 of \d by split.no and split.count, and part 0 of 1"):
        ModelConfig.from_directory(directory)


def test_earlier_files_of_qwen3_next_have_the_projection_by_key_heads(tmp_path: Path) -> None:
    from tests.support import gguf_models

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "_divided", lambda name, data, _: [(name, data)])
        model = _in_gguf(tmp_path, "qwen3next")
    assert any(name.endswith("ssm_in.weight") for name in _tensors(model))
    _check_logits(model)


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    from tests.support import gguf_models

    whole = gguf_models._stored

    def joined(*args: Any, **more: Any) -> Iterator[tuple[str, Any]]:
        gates = {}
        for name, data in whole(*args, **more):
            if "ffn_gate_exps" in name:
                gates[name] = data
            elif "ffn_up_exps" in name:
                gate = gates.pop(name.replace("up_exps", "gate_exps"))
                yield name.replace("up_exps", "gate_up_exps"), np.concatenate([gate, data], axis=1)
            else:
                yield name, data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "_stored", joined)
        model = _in_gguf(tmp_path, "qwen35moe")
    assert any(name.endswith("ffn_gate_up_exps.weight") for name in _tensors(model))
    _check_logits(model)


@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_quantised_projections_of_the_delta_rule_are_read_in_hugging_faces_order(tmp_path: Path, name: str) -> None:
    variant, architecture, _ = MODELS[name]
    source = save_tiny(
        variant, tmp_path / "source", hidden_size=64, linear_num_key_heads=8, linear_num_value_heads=16,
        linear_value_head_dim=16, linear_key_head_dim=8,
    )  # fmt: skip
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf" / "tiny.gguf"
    write_gguf_model(
        source.directory,
        file,
        architecture,
        kind=lambda _, data: "F32" if data.ndim < 2 or data.shape[-1] % 32 else "Q8_0",
    )
    stored = load_file(source.directory / "model.safetensors")
    layer = "model.layers.0.linear_attn"
    names = [name for name in stored if name.startswith(layer) and max(stored[name].shape[:2]) >= 224]
    names.remove(f"{layer}.conv1d.weight")
    assert len(names) >= 2
    with Checkpoint(tmp_path / "gguf") as checkpoint:
        for each in names:
            floats, by_columns = stored[each], each.endswith("out_proj.weight")
            for begin, end in ((0, 256), (32, 96), (96, 224)):
                own = UnitRange(begin, min(end, floats.shape[by_columns]))
                part = TensorSlice(
                    each, tuple(floats.shape), rows=None if by_columns else own, columns=own if by_columns else None
                )
                found = checkpoint.read_quantized(part)
                meant = floats[:, slice(*own)] if by_columns else floats[slice(*own)]
                assert found.format == checkpoint.format_of(part)
                assert (found.dequantized() - meant).abs().max() <= floats.abs().max() / 127


def test_experts_stay_as_narrow_as_they_are_stored_and_each_is_read_by_itself(tmp_path: Path) -> None:
    kinds = {"gate": "Q4_0", "up": "Q8_0", "down": "MXFP4"}

    def kind(name: str, data: np.ndarray[Any, Any]) -> str:
        return kinds.get(name.removeprefix("blk.0.ffn_").removesuffix("_exps.weight"), "F32")

    source = save_tiny("gpt-oss", tmp_path / "source", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    (tmp_path / "gguf").mkdir()
    write_gguf_model(source.directory, tmp_path / "gguf" / "tiny.gguf", "gpt-oss", kind=kind)
    stored = load_file(source.directory / "model.safetensors")
    block = "model.layers.0.mlp.experts"
    meant = {
        "gate": stored[f"{block}.gate_up_proj"][4, :, ::2].T,
        "up": stored[f"{block}.gate_up_proj"][4, :, 1::2].T,
        "down": stored[f"{block}.down_proj"][4].T,
    }
    assert ModelConfig.from_directory(tmp_path / "gguf").weights.experts == WeightFormat(8, 32)
    with Checkpoint(tmp_path / "gguf") as checkpoint:
        for first, (name, floats) in enumerate(meant.items()):
            which = f"{block}.down_proj" if name == "down" else f"{block}.gate_up_proj"
            entry = StackEntry(4, 6) if name == "down" else StackEntry(4, 6, first=first, step=2)
            part = TensorSlice(which, tuple(floats.shape), rows=UnitRange(3, 17), entry=entry)
            packed = gguf.quantize(floats.contiguous().numpy(), gguf.GGMLQuantizationType[kinds[name]])
            expected = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType[kinds[name]]))[3:17]
            found = checkpoint.read_quantized(part)
            kept = WeightFormat(4, 32, is_float=True) if name == "down" else WeightFormat(8, 32)
            assert found.format == checkpoint.format_of(part) == kept
            assert torch.equal(found.dequantized(), expected)
            checkpoint.measure_loss(part, found.format)
        assert checkpoint.conversions.lines == (
            "MXFP4 -> 4-bit floats in groups of 32, loss 0 %",
            "Q4_0 and Q8_0 -> 8 bits in groups of 32, loss 0 %",
        )


def test_a_directory_with_nothing_but_a_gguf_file_can_be_served(tmp_path: Path) -> None:
    directory = _in_gguf(tmp_path, "qwen3").directory
    assert check_model_directory(directory) == ModelConfig.from_directory(directory)
    file = directory / "tiny.gguf"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ModelStoreError, match=r"tiny\.gguf: tensor .* ends behind the file's end"):
        check_model_directory(directory)


def test_of_several_models_in_a_directory_one_file_is_the_model(tmp_path: Path) -> None:
    model = _in_gguf(tmp_path, "qwen3", split_max_tensors=9)
    other = save_tiny("qwen3", tmp_path / "other", rms_norm_eps=1e-3).directory
    write_gguf_model(other, model.directory / "b.gguf", "qwen3")
    first = min(path for path in model.directory.iterdir() if path.name.startswith("tiny-"))
    assert model_fingerprint(first) != model_fingerprint(model.directory / "b.gguf")
    assert ModelConfig.from_directory(model.directory / "b.gguf").rms_norm_eps == pytest.approx(1e-3)
    assert {path.name[:4] for path in checkpoint_files(first)} == {"tiny"}
    _check_logits(TinyCheckpoint(first, model.reference))


def test_ranks_and_gateway_can_tell_whether_they_look_at_the_same_gguf(tmp_path: Path) -> None:
    model = _in_gguf(tmp_path, "qwen3").directory
    other = save_tiny("qwen3", tmp_path / "other", rms_norm_eps=1e-3).directory
    (tmp_path / "changed").mkdir()
    write_gguf_model(other, tmp_path / "changed" / "tiny.gguf", "qwen3")
    copied = shutil.copytree(model, tmp_path / "copy")
    assert model_fingerprint(model) == model_fingerprint(copied) != model_fingerprint(tmp_path / "changed")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("expert_gating_func", 1, r"tiny.gguf: deepseek2.expert_gating_func must be 2, sigmoid"),
        ("block_count", 0, r"tiny.gguf: deepseek2.block_count must be a whole number of at least 1, not 0"),
        ("rope.scaling.yarn_attn_factor", 1.5, ""),
    ],
)
def test_metadata_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    directory = _in_gguf(tmp_path, "deepseek2", fields={field: value}).directory
    if not message:  # it is for rotations that are scaled
        ModelConfig.from_directory(directory)
        return
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_directory(directory)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), (0, 2)),
        (("<|end_of_text|>", "<|end|>", "<EOT>"), (0, 1, 2)),
        (("<|end|>", "<|return|>", "<|call|>"), (1, 2)),
    ],
)
def test_tokens_that_end_a_turn_are_known_by_their_texts(
    tmp_path: Path, texts: tuple[str, ...], ends: tuple[int, ...]
) -> None:
    model = _in_gguf(tmp_path, "qwen3", tokens={3 + number: text for number, text in enumerate(texts)})
    assert ModelConfig.from_directory(model.directory).eos_token_ids[-len(ends) :] == tuple(3 + end for end in ends)


@pytest.mark.parametrize(
    ("fields", "kind", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, "linear", 4),
        ({"rope.scale_linear": 4.0}, "linear", 4),
        ({"rope.scaling.factor": 1.0}, "default", 1),
        ({"rope.scaling.factor": 0.0}, "default", 1),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default", 1),
    ],
)
def test_rotations_are_scaled_as_by_llama_cpp(
    tmp_path: Path, fields: Mapping[str, Any], kind: str, factor: float
) -> None:
    rope = ModelConfig.from_directory(_in_gguf(tmp_path, "qwen3", fields=fields).directory).rope
    assert (rope.kind, rope.factor) == (kind, factor)


@pytest.mark.parametrize("name", ["attn_factor", "yarn_attn_factor"])
def test_amplitudes_of_rotations_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, f"rope.scaling.{name}": 0.5}
    config = ModelConfig.from_directory(_in_gguf(tmp_path, "qwen3", fields=fields).directory)
    assert config.rope.amplitude == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
