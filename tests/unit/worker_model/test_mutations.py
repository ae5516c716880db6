"""A thousand damaged files of each kind: each is read all the same, or refused by a ModelError that names it.

Nothing else is raised, nothing hangs, and memory stays bounded.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
from safetensors import safe_open

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufHeader
from hetero_api.model_config import ModelConfig
from hetero_api.packed_weights import PackedWeights
from hetero_client.errors import ModelStoreError
from hetero_client.model_store.store import check_model_directory
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from hetero_worker.checkpoints.gguf_store import open_gguf
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.store import TensorSlice
from tests.support.gguf_models import add_tokenizer, write_gguf_model
from tests.support.mutations import MOST_BYTES, memory_limit, mutated_bytes, mutated_json, survivors, use_config
from tests.support.tiny_checkpoints import save_tiny

pytestmark = [pytest.mark.unit, pytest.mark.timeout(280)]

COUNT: Final = 1000
SEEDS: Final = {"first": range(1), "more": range(1, 10)}
VARIANTS: Final = ("llama3-rope", "gemma3", "smollm3-window", "glm4-moe-grouped", "gpt-oss", "deepseek-v3-yarn")
QUANTIZATIONS: Final[tuple[dict[str, Any], ...]] = (
    {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "group_size": 32,
     "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True, "group_size": 32, "checkpoint_format": "gptq"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
     "quantization_status": "compressed", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
         "type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
         "actorder": None}}}},
    {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["re:.*lm_head", "lm_head"],
     "config_groups": {
         "group_0": {"format": "float-quantized", "targets": ["re:.*self_attn.*"], "weights": {
             "type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}},
         "group_1": {"format": "nvfp4-pack-quantized", "targets": ["Linear"], "weights": {
             "type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": False}}}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*mlp.gate"]},
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
)  # fmt: skip


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("quantized", [False, True], ids=["config.json", "quantization_config"])
def test_damaged_configs(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, quantized: bool, seeds: range
) -> None:
    configs = [_config(tmp_path_factory, variant) for variant in VARIANTS]
    path = tmp_path / "config.json"

    def mutate(random_: random.Random) -> str:
        config = random_.choice(configs)
        if quantized:
            damaged = mutated_json(random_.choice(QUANTIZATIONS), random_)
            path.write_bytes(json.dumps(config)[:-1].encode() + b', "quantization_config": ' + damaged + b"}")
        else:
            path.write_bytes(mutated_json(config, random_))
        return "config.json"

    loaded = survivors(lambda: use_config(ModelConfig.from_directory(tmp_path)), mutate, seeds=seeds, count=COUNT)
    assert 0.1 < loaded / COUNT / len(seeds) < 0.9


_configs: Final[dict[str, Any]] = {}


def _config(factory: pytest.TempPathFactory, variant: str) -> Any:
    if variant not in _configs:
        directory = save_tiny(variant, factory.mktemp(variant)).directory
        _configs[variant] = json.loads((directory / "config.json").read_text())
    return _configs[variant]


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize(
    ("variant", "architecture"),
    [
        ("qwen3-moe", "qwen3moe"), ("deepseek-v3", "deepseek2"), ("gemma3", "gemma3"), ("qwen3.5-moe", "qwen35moe"),
        ("gemma4-moe", "gemma4"),
    ],
)  # fmt: skip
def test_damaged_gguf_files(tmp_path: Path, variant: str, architecture: str, seeds: range) -> None:
    source = save_tiny(variant, tmp_path / "source").directory
    # Of a stack of gates and ups each expert is read by itself.
    parts = [part for part in _parts(source) if not part.name.endswith("gate_up_proj")]
    (tmp_path / "gguf").mkdir()
    path = tmp_path / "gguf" / "tiny.gguf"
    write_gguf_model(source, path, architecture)
    whole = path.read_bytes()
    end = min(tensor.offset for tensor in GgufHeader.read(path).tensors.values())

    def mutate(random_: random.Random) -> str:
        path.write_bytes(mutated_bytes(whole, random_, end))
        return "gguf"

    def read() -> None:
        use_config(ModelConfig.from_directory(path.parent))
        _read_all(path.parent, parts)

    assert survivors(read, mutate, seeds=seeds, count=COUNT // 3 + 1) > 10


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_damaged_tokenizers_of_gguf_files(tmp_path: Path, model: str, seeds: range) -> None:
    path = tmp_path / "tiny.gguf"
    _write_tokenizer(path, model)
    whole = path.read_bytes()

    def mutate(random_: random.Random) -> str:
        path.write_bytes(mutated_bytes(whole, random_))
        return "tiny.gguf"

    def read() -> None:
        tokenizer = TextTokenizer.from_directory(tmp_path)
        tokenizer.encode("a bc")
        assert tokenizer.vocab_size < 100

    assert survivors(read, mutate, seeds=seeds, count=COUNT // 4) > 10


def _write_tokenizer(path: Path, model: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, model)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("damaged", ["header", "index"])
def test_damaged_safetensors(tmp_path: Path, damaged: str, seeds: range) -> None:
    source = save_tiny("qwen2", tmp_path / "source", max_shard_size="60KB").directory
    parts, whole = _parts(source), tmp_path / "whole"
    shutil.copytree(source, whole)
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    shards, changed = sorted(whole.glob("*.safetensors")), list[str]()

    def mutate(random_: random.Random) -> str:
        for path in changed:
            shutil.copy(whole / path, source)
        if damaged == "index":
            changed[:] = ["model.safetensors.index.json"]
            (source / changed[0]).write_bytes(mutated_json(index, random_))
        else:
            changed[:] = [random_.choice(shards).name]
            (source / changed[0]).write_bytes(_damaged_shard((whole / changed[0]).read_bytes(), random_))
        return str(source)

    def read() -> None:
        try:
            check_model_directory(source)
        except ModelStoreError as error:
            if str(source) not in str(error):
                raise AssertionError(f"names no file: {error}") from error
        _read_all(source, parts)

    (source / "tokenizer.json").write_text("{}")
    assert survivors(read, mutate, seeds=seeds, count=COUNT // 2) > 3


def _damaged_shard(data: bytes, random_: random.Random) -> bytes:
    """Change the header's length, its JSON, or what that says."""
    end = 8 + int.from_bytes(data[:8], "little")
    if random_.random() < 0.3:
        return mutated_bytes(data, random_, end)
    header = mutated_json(json.loads(data[8:end]), random_)
    return len(header).to_bytes(8, "little") + header + data[end:]


def _parts(directory: Path) -> list[TensorSlice]:
    """All tensors of a directory's safetensors files."""
    parts = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            parts += [TensorSlice(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
    return parts


def _read_all(directory: Path, parts: list[TensorSlice]) -> None:
    store = open_gguf(directory) or SafetensorsStore(directory)
    for part in parts:
        if store.format_of(part.name) is None:
            store.floats(part).sum()
        else:
            store.quantized(part)


def test_the_size_of_a_group_is_bounded() -> None:
    config = {"quantization_config": QUANTIZATIONS[0] | {"group_size": 1 << 31}}
    with pytest.raises(
        ModelError, match=r"x: quantization_config.group_size must be -1 or a whole number from 16 to 65"
    ):
        PackedWeights.of_config(config, source="x")


def test_a_limit_of_memory_is_one() -> None:
    with pytest.raises(RuntimeError, match="memory"), memory_limit(MOST_BYTES):
        torch.empty(MOST_BYTES * 2, dtype=torch.uint8)


def test_other_errors_and_unnamed_files_are_seen(tmp_path: Path) -> None:
    def refuse(problem: Exception) -> None:
        raise problem

    with pytest.raises(AssertionError, match="mutation 0 of seed 0 raised KeyError"):
        survivors(lambda: refuse(KeyError("x")), lambda _: "x", seeds=range(1), count=1)
    with pytest.raises(AssertionError, match="mutation 0 of seed 0: no name"):
        survivors(lambda: refuse(ModelError("no name")), lambda _: "x.gguf", seeds=range(1), count=1)
