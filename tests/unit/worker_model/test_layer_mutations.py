"""A thousand damaged layers, spread over all layouts, and as many damaged tokenizers and templates.

Each is read all the same, or refused by a ModelError that names the files and the tensor or field; nothing else is
raised, and memory stays bounded.
"""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufHeader
from hetero_gateway.engine.errors import InvalidRequest
from hetero_worker.checkpoints.gguf_store import GgufStore
from hetero_worker.checkpoints.packed_safetensors import open_packed_safetensors
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.store import StackEntry, TensorSlice, WeightStore
from tests.support.gguf_models import write_one_matrix
from tests.support.mutations import mutated_bytes, mutated_json, survivors
from tests.support.quantized_files import LAYER, WEIGHT
from tests.support.quantized_layers import ACT_ORDER, CASES, FLOATS, INPUTS, OUTPUTS, save_layer
from tests.unit.fuzz.targets import TARGETS

pytestmark = [pytest.mark.unit, pytest.mark.timeout(280)]

COUNT: Final = 1000
SEEDS: Final = {"first": range(1), "more": range(1, 10)}
STACK: Final = "mxfp4 of experts"
LAYOUTS: Final = (*CASES, *FLOATS, *ACT_ORDER, STACK)
EXPERTS: Final = "model.layers.0.mlp.experts.gate_up_proj"
PART: Final = TensorSlice(WEIGHT, (OUTPUTS, INPUTS))
EXPERT: Final = TensorSlice(EXPERTS, (OUTPUTS, INPUTS), entry=StackEntry(1, 3, first=1, step=2))
KINDS: Final = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_HOSTILE: Final = (0, -1, 1, 2, 127, 128, 255, 65504, 1 << 31, 2**127, float("inf"), float("-inf"), float("nan"), 1e-40)

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("damaged", ["tensors", "bytes", "quantization_config"])
def test_damaged_layers(tmp_path: Path, damaged: str, seeds: range) -> None:
    whole = {name: _whole(tmp_path / name, name) for name in LAYOUTS}
    directory = tmp_path / "damaged"
    directory.mkdir()
    part = PART

    def mutate(random_: random.Random) -> str:
        nonlocal part
        name = random_.choice(LAYOUTS)
        part = EXPERT if name == STACK else PART
        tensors, config, content = whole[name]
        if damaged == "tensors":
            save_file(_changed(tensors, random_), directory / "model.safetensors")
        else:
            content = _changed_values(content, random_) if damaged == "bytes" else content
            (directory / "model.safetensors").write_bytes(content)
        text = mutated_json(config, random_) if damaged == "quantization_config" else json.dumps(config).encode()
        (directory / "config.json").write_bytes(b'{"quantization_config": ' + text + b"}")
        return str(directory)

    loaded = survivors(lambda: _read(directory, part), mutate, seeds=seeds, count=COUNT // 3 + 1)
    assert loaded > COUNT // 100


def _whole(directory: Path, name: str) -> tuple[Tensors, Any, bytes]:
    """Tensors, configuration and file of a layer in a layout."""
    directory.mkdir()
    if name == STACK:
        shape = 3, 2 * OUTPUTS, INPUTS // 32
        generator = torch.Generator().manual_seed(0)
        tensors = {
            f"{EXPERTS}_blocks": torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8),
            f"{EXPERTS}_scales": torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8),
        }
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    else:
        save_layer(directory, name)
    path, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    return load_file(path), config["quantization_config"], path.read_bytes()


def _read(directory: Path, part: TensorSlice) -> None:
    """As a loading rank does, which also measures what is lost. Errors name tensor or field."""
    try:
        _use(open_packed_safetensors(directory) or SafetensorsStore(directory), part)
    except ModelError as error:
        if not any(name in str(error) for name in (LAYER, EXPERTS, "quantization_config", "config.json")):
            raise AssertionError(f"names neither tensor nor field: {error}") from error
        raise


def _use(store: WeightStore, part: TensorSlice) -> None:
    store.stored_as(part.name)
    if store.format_of(part.name) is None:
        store.floats(part).sum()
    else:
        assert store.quantized(part).dequantized().shape == store.exact(part).shape == part.shape


def _changed(tensors: Tensors, random_: random.Random) -> Tensors:
    """With one tensor that is lost, of another name, shape or type, or with other numbers."""
    name = random_.choice(sorted(tensors))
    others = {key: each for key, each in tensors.items() if key != name}
    tensor = tensors[name]
    match random_.randrange(8):
        case 0:
            return others
        case 1:
            other = random_.choice(("g_idx", "weight_g_idx", "weight", "weight_packed", "qweight", "weight_scale_inv"))
            return {**others, f"{name.rpartition('.')[0]}.{other}": tensor}
        case 2:
            return {**others, name: tensor.to(random_.choice(KINDS))}
        case 3 | 4:
            return {**others, name: _other_shape(tensor, random_)}
        case 5:
            return {**others, name: random_.choice(list(tensors.values())).clone()}
        case _:
            changed = tensor.clone().flatten()
            number = torch.tensor([float(random_.choice(_HOSTILE))], dtype=torch.float64).to(tensor.dtype)
            begin = random_.randrange(changed.numel())
            changed[begin : begin + random_.choice((1, 4, changed.numel()))] = number
            return {**others, name: changed.view(tensor.shape)}


def _other_shape(tensor: torch.Tensor, random_: random.Random) -> torch.Tensor:
    match random_.randrange(4):
        case 0:
            return tensor.flatten()
        case 1:
            return tensor.unsqueeze(random_.randrange(tensor.dim() + 1)).contiguous()
        case 2:
            return tensor.T.contiguous() if tensor.dim() == 2 else tensor.flatten()[:0]
    axis = random_.randrange(max(1, tensor.dim()))
    shape = list(tensor.shape) or [1]
    shape[axis] = random_.choice((0, 1, 2, 100, shape[axis] - 1, shape[axis] + 1))
    return tensor.flatten()[torch.arange(math.prod(shape)) % tensor.numel()].view(shape)


def _changed_values(content: bytes, random_: random.Random) -> bytes:
    """A file with damage behind its header, of the same length."""
    begin = 8 + int.from_bytes(content[:8], "little")
    values = mutated_bytes(content[begin:], random_)
    return content[:begin] + values[: len(content) - begin].ljust(len(content) - begin, b"\xff")


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "MXFP4"])
def test_damaged_gguf_blocks(tmp_path: Path, kind: str, seeds: range) -> None:
    name, path = "model.layers.0.mlp.down_proj.weight", tmp_path / "tiny.gguf"
    write_one_matrix(path, kind, rows=4, columns=256)
    whole, stored = path.read_bytes(), GgufHeader.read(path).tensors["blk.0.ffn_down.weight"]

    def mutate(random_: random.Random) -> str:
        blocks = mutated_bytes(whole[stored.offset :][: stored.num_bytes], random_)
        path.write_bytes(whole[: stored.offset] + blocks + whole[stored.offset + stored.num_bytes :])
        return str(path)

    def read() -> None:
        try:
            _use(GgufStore((path,)), TensorSlice(name, (4, 256)))
        except ModelError as error:
            if name not in str(error) and "blk.0.ffn_down.weight" not in str(error):
                raise AssertionError(f"names no tensor: {error}") from error
            raise

    assert survivors(read, mutate, seeds=seeds, count=COUNT // 3 + 1) > COUNT // 10


@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
def test_damaged_tokenizers_and_chat_templates(seeds: range) -> None:
    target = TARGETS["tokenizers"]
    originals = list(target.seeds())
    data = b""

    def mutate(random_: random.Random) -> str:
        nonlocal data
        data = target.mutate(random_.choice(originals), random_)
        return "fuzz-tokenizer-"

    def read() -> None:
        with suppress(InvalidRequest):  # of a template that is one, and cannot be rendered
            target.run(data)

    assert survivors(read, mutate, seeds=seeds, count=COUNT) > COUNT // 10
