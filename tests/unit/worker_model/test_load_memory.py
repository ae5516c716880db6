"""What a load needs of memory beside the weights: pages of files that were read do not stay."""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetero_api.sharding import UnitRange
from hetero_api.weight_format import INT8, WeightFormat, int4
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.gguf_store import GgufStore
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.store import MappedFile, StackEntry, TensorSlice

pytestmark = pytest.mark.unit

SHAPE = (4096, 2048)
LARGE_PAGE = 2 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_file({"w": torch.randn(SHAPE).bfloat16(), "b": torch.randn(8)}, folder / "model.safetensors")
    return folder


def _resident_bytes(path: Path) -> int:
    """What of the file's mappings is in this process's memory."""
    count, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ")[0]:
            is_of_file = line.endswith(str(path))
        elif is_of_file and line.startswith("Rss:"):
            count += int(line.split()[1]) * 1024
    return count


def test_pages_that_are_let_go_come_back(directory: Path) -> None:
    path = directory / "model.safetensors"
    mapped = MappedFile(path)
    before = mapped.bytes.clone()
    assert _resident_bytes(path) > path.stat().st_size // 2
    mapped.release_pages()
    assert _resident_bytes(path) <= mmap.PAGESIZE
    assert torch.equal(mapped.bytes, before)


@pytest.mark.parametrize("columns", [None, UnitRange(64, 1024)])
def test_pages_of_floats_that_were_read_do_not_stay(directory: Path, columns: UnitRange | None) -> None:
    part = TensorSlice("w", SHAPE, rows=UnitRange(0, 3000), columns=columns)
    with Checkpoint(directory) as checkpoint:
        checkpoint.read(part, torch.empty(part.shape))
        assert _resident_bytes(directory / "model.safetensors") <= mmap.PAGESIZE


@pytest.mark.parametrize("weights", [INT8, int4()], ids=str)
def test_pages_of_floats_that_were_quantised_do_not_stay(directory: Path, weights: WeightFormat) -> None:
    with Checkpoint(directory) as checkpoint:
        checkpoint.read_quantized(TensorSlice("w", SHAPE, quantize_to=weights))
        assert _resident_bytes(directory / "model.safetensors") <= mmap.PAGESIZE


def test_a_weight_can_be_had_as_it_lies_in_its_file(directory: Path) -> None:
    rows = TensorSlice("w", SHAPE, rows=UnitRange(16, 48))
    with Checkpoint(directory) as checkpoint:
        into = torch.empty(rows.shape, dtype=torch.bfloat16)
        checkpoint.read(rows, into)
        found = checkpoint.in_place(rows)
        assert found is not None
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, into)
        checkpoint.release_pages()
        assert torch.equal(found, into)


def test_a_weight_that_lies_otherwise_cannot(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.in_place(TensorSlice("w", SHAPE, columns=UnitRange(0, 64))) is None
        assert checkpoint.in_place(TensorSlice("w", SHAPE, quantize_to=INT8)) is None


def test_tensors_that_do_not_begin_at_their_width_are_read(tmp_path: Path) -> None:
    """Headers are filled up to a multiple of eight by most who write them; the format does not ask for it."""
    values = torch.arange(6, dtype=torch.float32)
    header = b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    header += b" " * (-len(header) % 8 + 3)
    content = len(header).to_bytes(8, "little") + header + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    into = torch.empty(2, 3)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read(TensorSlice("w", (2, 3)), into)
    assert torch.equal(into, values.view(2, 3))


@pytest.mark.parametrize("rows", [None, UnitRange(0, 2048)])
def test_of_a_stack_of_experts_no_other_expert_is_read(tmp_path: Path, rows: UnitRange | None) -> None:
    path, shape, kind = tmp_path / "model.gguf", (4, 4096, 2048), gguf.GGMLQuantizationType.Q8_0
    packed = np.zeros((*shape[:2], shape[2] // 32 * 34), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tensor("blk.0.ffn_up_exps.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = GgufStore((path,))
    part = TensorSlice("model.layers.0.mlp.experts.3.up_proj.weight", shape[1:], rows=rows)
    matrix = store.quantized(part)
    # At both ends, the kernel may map a large page around one that is read.
    assert matrix.num_bytes <= _resident_bytes(path) <= 1.05 * matrix.num_bytes + 2 * LARGE_PAGE


@pytest.mark.parametrize("rows", [None, UnitRange(256, 512)])
def test_of_stacked_floats_no_other_expert_is_read(tmp_path: Path, rows: UnitRange | None) -> None:
    """Gates and up projections of four experts; the up projection of one is read."""
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.gate_up_proj"
    save_file({name: torch.zeros(4, 2048, 2048, dtype=torch.bfloat16)}, path)
    entry = StackEntry(2, 4, first=1024, height=2048)
    found = SafetensorsStore(tmp_path).floats(TensorSlice(name, (1024, 2048), rows=rows, entry=entry))
    assert found.is_contiguous()
    found.sum()
    assert found.nbytes <= _resident_bytes(path) <= 1.05 * found.nbytes + 2 * LARGE_PAGE
