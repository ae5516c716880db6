"""GGUF files: read as the gguf package reads them, in slices and in Hugging Face's order of rows; damage is told."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GGML_TYPES, GgufHeader
from hetero_api.gguf_model import gguf_header, gguf_weights
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.conversion import SAMPLED_ROWS
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.native_linear import NativeLinear, NativeWeight
from tests.support.bytes_read import counting_reads
from tests.support.native_compute import op_queue_of
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

ROWS: Final = 24
COLUMNS: Final = 512
HEADS: Final = 3
DOWN: Final = "model.layers.0.mlp.down_proj.weight"
STORED_DOWN: Final = "blk.0.ffn_down.weight"
FORMATS: Final = {
    "Q8_0": WeightFormat(8, 32),
    "Q4_0": WeightFormat(4, 32),
    "Q4_1": WeightFormat(4, 32, has_minimum=True),
    "Q5_0": WeightFormat(8, 32),
    "Q5_1": WeightFormat(8, 32, has_minimum=True),
    "Q2_K": WeightFormat(4, 16, has_minimum=True),
    "Q3_K": WeightFormat(4, 16),
    "Q4_K": WeightFormat(4, 32, has_minimum=True),
    "Q5_K": WeightFormat(8, 32, has_minimum=True),
    "Q6_K": WeightFormat(8, 16),
    "IQ4_NL": WeightFormat(8, 32),
    "IQ4_XS": WeightFormat(8, 32),
    "MXFP4": WeightFormat(4, 32, is_float=True),
}
SCALES: Final = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where the float16 numbers of a block lie, of types that the gguf package does not pack."""
FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Bytes = npt.NDArray[np.uint8]


def _blocks(kind: str, rows: int = ROWS, columns: int = COLUMNS) -> Bytes:
    """A random matrix in blocks. Where the gguf package packs none, all bytes are random but the scales'."""
    random = np.random.default_rng(5)
    weights = random.normal(0, 0.1, (rows, columns)).astype(np.float32)
    if kind not in SCALES:
        return np.asarray(gguf.quantize(weights, Kind[kind])).view(np.uint8).reshape(rows, -1)
    each, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = random.integers(0, 256, (rows, columns // each, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = random.uniform(0.001, 0.01, blocks.shape[:2]).astype("<f2")
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _meant(stored: Bytes, kind: str) -> torch.Tensor:
    """float32, by the gguf package."""
    return torch.from_numpy(gguf.dequantize(stored, Kind[kind]).astype(np.float32)).reshape(len(stored), -1)


def _write(path: Path, tensors: dict[str, tuple[Bytes, str]], architecture: str = "llama", **fields: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_token_list(["a", "b"])
    for name, value in fields.items():
        writer.add_uint32(name.replace("__", "."), value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_slices_are_what_the_file_means(tmp_path: Path, kind: str) -> None:
    stored = _blocks(kind)
    _write(tmp_path / "model.gguf", {STORED_DOWN: (stored, kind)})
    meant = _meant(stored, kind)
    # K-quants and IQ4_XS have scales that are products of two numbers; these are rounded to float16.
    bound = 2**-10 * meant.abs().max() if kind.endswith(("_K", "_XS")) else 1e-6
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format_of(TensorSlice(DOWN, (ROWS, COLUMNS))) == FORMATS[kind]
        for rows in (None, UnitRange(0, 8), UnitRange(5, 6), UnitRange(17, 24)):
            for columns in (None, UnitRange(0, 64), UnitRange(64, 320), UnitRange(480, 512), UnitRange(13, 290)):
                part = TensorSlice(DOWN, (ROWS, COLUMNS), rows=rows, columns=columns)
                found = checkpoint.read_quantized(part)
                assert found.format == checkpoint.format_of(part)
                expected = meant[slice(*part.row_range), slice(*part.column_range)]
                assert (found.dequantized() - expected).abs().max() <= bound
                assert torch.equal(found.scales, found.scales.half().float())


@pytest.mark.parametrize("kind", [*FORMATS, *FLOATS])
def test_a_rank_reads_its_slices_only(tmp_path: Path, kind: str) -> None:
    """Blocks are read whole."""
    _write(tmp_path / "model.gguf", {STORED_DOWN: (_blocks(kind), kind)})
    values, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    for rows in (UnitRange(0, ROWS), UnitRange(5, 17)):
        for begin, end in ((0, COLUMNS), (256, 512), (64, 300)):
            part = TensorSlice(DOWN, (ROWS, COLUMNS), rows=rows, columns=UnitRange(begin, end))
            with counting_reads() as count, Checkpoint(tmp_path) as checkpoint:
                checkpoint.read(part, torch.empty(part.shape))
                assert count() == rows.size * (-(-end // values) - begin // values) * size


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(None, UnitRange(128, 512)), (UnitRange(96, 256), None)], ids=["columns", "rows"]
)
def test_a_slice_takes_no_more_memory_than_its_width_says(
    tmp_path: Path, kind: str, rows: UnitRange | None, columns: UnitRange | None
) -> None:
    _write(tmp_path / "model.gguf", {STORED_DOWN: (_blocks(kind, 256), kind)})
    part = TensorSlice(DOWN, (256, COLUMNS), rows=rows, columns=columns)
    linear = ShardedLinear([part])
    with Checkpoint(tmp_path) as checkpoint:
        linear.load(checkpoint, dtype=torch.float32, kernel=NativeLinear(op_queue_of()))
    assert isinstance(linear.packed, NativeWeight)
    expected = FORMATS[kind].matrix_bytes(*part.shape)
    assert expected <= linear.packed.num_bytes <= 1.05 * expected


@pytest.mark.parametrize("kept", [None, torch.bfloat16], ids=["quantised", "widened"])
@pytest.mark.parametrize("kind", FORMATS)
def test_status_tells_what_ranks_keep_of_a_type_and_what_it_loses(
    tmp_path: Path, kind: str, kept: torch.dtype | None
) -> None:
    line, error = _loss(tmp_path, _blocks(kind), kind, kept)
    assert line == f"{kind} -> {'bfloat16' if kept else FORMATS[kind]}, loss {100 * error:.2g} %"
    if kept:  # MXFP4's numbers have four bits, and powers of two for scales
        assert (error > 1e-3) == (kind != "MXFP4")
    else:  # scales that are products of two numbers are rounded
        assert (error > 1e-5) == kind.endswith(("_K", "_XS"))
    assert error < 4e-3


def test_scales_of_mxfp4_that_float16_has_not_are_a_loss(tmp_path: Path) -> None:
    """Weights of a row are ten powers of two around float16's least."""
    sizes = np.exp2(np.arange(-30, -20)).repeat(32).astype(np.float32)
    stored = np.asarray(gguf.quantize(sizes[None].repeat(ROWS, 0), Kind.MXFP4))
    line, error = _loss(tmp_path, stored, "MXFP4", None)
    assert line == f"MXFP4 -> 4-bit floats in groups of 32, loss {100 * error:.2g} %"
    assert 0.1 < error < 0.9


def _loss(directory: Path, stored: Bytes, kind: str, kept: torch.dtype | None) -> tuple[str, float]:
    """The line of a matrix, and its error by what the gguf package reads."""
    meant = _meant(stored, kind)[:SAMPLED_ROWS]
    _write(directory / "model.gguf", {STORED_DOWN: (stored, kind)})
    part = TensorSlice(DOWN, (ROWS, meant.shape[1]))
    found = torch.empty(part.shape, dtype=kept or torch.float32)
    with Checkpoint(directory) as checkpoint:
        checkpoint.measure_loss(part, kept or FORMATS[kind])
        checkpoint.read(part, found)
        [line] = checkpoint.conversions.lines
    return line, float((found[:SAMPLED_ROWS].float() - meant).norm() / meant.norm())


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_are_read_as_they_are(tmp_path: Path, kind: str) -> None:
    stored, norm = _blocks(kind), _blocks("F32", 1, ROWS)[0]
    _write(tmp_path / "model.gguf", {STORED_DOWN: (stored, kind), "output_norm.weight": (norm, "F32")})
    part = TensorSlice(DOWN, (ROWS, COLUMNS), rows=UnitRange(3, 9), columns=UnitRange(7, 100))
    into, of_norm = torch.empty(part.shape), torch.empty(5)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format_of(part) is None
        assert checkpoint.dtype_of(part) == FLOATS[kind]
        checkpoint.read(part, into)
        checkpoint.read(TensorSlice("model.norm.weight", (ROWS,), rows=UnitRange(2, 7)), of_norm)
    assert torch.equal(into, _meant(stored, kind)[3:9, 7:100])
    assert torch.equal(of_norm, torch.from_numpy(norm.view(np.float32))[2:7])


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("name", ["q", "k"])
def test_heads_of_the_llama_family_are_put_in_hugging_faces_order(tmp_path: Path, kind: str, name: str) -> None:
    dim = ROWS // HEADS
    stored = _blocks(kind)
    # As the conversion to GGUF interleaves the halves of a head: row 2·i + j is row j·dim/2 + i.
    order = [head * dim + (i % 2) * dim // 2 + i // 2 for head in range(HEADS) for i in range(dim)]
    tensors = {f"blk.0.attn_{name}.weight": (stored[order], kind), "blk.0.attn_v.weight": (stored, kind)}
    _write(tmp_path / "model.gguf", tensors)
    meant = _meant(stored, kind)
    with Checkpoint(tmp_path) as checkpoint:
        for rows in (UnitRange(0, ROWS), UnitRange(dim, 2 * dim), UnitRange(5, 20)):
            for module in (name, "v"):
                part = TensorSlice(f"model.layers.0.self_attn.{module}_proj.weight", (ROWS, COLUMNS), rows=rows)
                into = torch.empty(part.shape)
                checkpoint.read(part, into)
                assert torch.equal(into, meant[slice(*rows)])


def test_rows_of_other_families_are_in_order(tmp_path: Path) -> None:
    stored = _blocks("Q8_0")
    _write(tmp_path / "model.gguf", {"blk.0.attn_q.weight": (stored, "Q8_0")}, architecture="qwen3")
    part, into = TensorSlice("model.layers.0.self_attn.q_proj.weight", (ROWS, COLUMNS)), torch.empty(ROWS, COLUMNS)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read(part, into)
    assert torch.equal(into, _meant(stored, "Q8_0"))


def test_a_models_width_is_that_of_its_widest_matrices(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": (_blocks("Q8_0"), "Q8_0"),
        "blk.0.ffn_up.weight": (_blocks("Q4_K"), "Q4_K"),
        "blk.0.ffn_down.weight": (_blocks("Q6_K"), "Q6_K"),
        "blk.0.ffn_norm.weight": (_blocks("F32", 1, ROWS)[0], "F32"),
    }
    found = gguf_weights(gguf_header((_write(tmp_path / "model.gguf", tensors),)))
    assert (found.layers, found.vocabulary) == (WeightFormat(8, 16, has_minimum=True), FORMATS["Q8_0"])
    assert found.method == "GGUF Q4_K, Q6_K, Q8_0"
    assert found.at_load.layers is None
    tensors["blk.0.ffn_gate.weight"] = (_blocks("F16"), "F16")
    mixed = gguf_weights(gguf_header((_write(tmp_path / "mixed.gguf", tensors),)))
    assert (mixed.layers, mixed.floats) == (None, "float16")


def test_a_directory_with_a_gguf_file_says_what_its_weights_are(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    _write(tmp_path / "model.gguf", {"token_embd.weight": (_blocks("Q4_0"), "Q4_0")})
    assert ModelConfig.from_directory(tmp_path).weights.vocabulary == FORMATS["Q4_0"]
    _write(tmp_path / "other.gguf", {"token_embd.weight": (_blocks("Q4_0"), "Q4_0")})
    with pytest.raises(ModelError, match=r"several models in GGUF \(model.gguf, other.gguf\)"):
        ModelConfig.from_directory(tmp_path)


def test_models_that_are_not_supported_are_refused_by_name(tmp_path: Path) -> None:
    path = _write(tmp_path / "model.gguf", {STORED_DOWN: (_blocks("F16"), "F16")}, "falcon")
    message = "general.architecture 'falcon' is not supported in GGUF; supported: llama, "
    with pytest.raises(ModelError, match=message) as caught, Checkpoint(tmp_path):
        pass
    assert str(path) in str(caught.value)


def test_a_type_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = _write(tmp_path / "model.gguf", {STORED_DOWN: (np.zeros((2, 74), np.uint8), "IQ2_XS")})
    with pytest.raises(ModelError, match=f"tensor {STORED_DOWN} is stored as IQ2_XS, which is not supported"):
        GgufHeader.read(path)


def test_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    ours = {number: (kind.name, kind.block_values, kind.block_bytes) for number, kind in GGML_TYPES.items()}
    assert ours == {number: (Kind(number).name, *gguf.GGML_QUANT_SIZES[Kind(number)]) for number in ours}


def test_what_is_missing_or_of_another_shape_is_told(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", {STORED_DOWN: (_blocks("Q8_0"), "Q8_0")})
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(ModelError, match=r"no tensor blk\.7\.ffn_down\.weight"):
            checkpoint.read(TensorSlice("model.layers.7.mlp.down_proj.weight", (1, 1)), torch.empty(1, 1))
        with pytest.raises(ModelError, match=r"shape \[24, 512\], config.json says \[24, 500\]"):
            checkpoint.read(TensorSlice(DOWN, (24, 500)), torch.empty(24, 500))


def test_scales_that_are_not_finite_are_told(tmp_path: Path) -> None:
    stored = _blocks("Q8_0").copy()
    stored[3, :2] = np.frombuffer(struct.pack("<e", float("inf")), np.uint8)
    _write(tmp_path / "model.gguf", {STORED_DOWN: (stored, "Q8_0")})
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match="scales are not finite"):
        checkpoint.read_quantized(TensorSlice(DOWN, (ROWS, COLUMNS)))


def test_every_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    whole = _write(tmp_path / "whole.gguf", {STORED_DOWN: (_blocks("Q8_0", 2, 32), "Q8_0")}).read_bytes()
    path = tmp_path / "cut.gguf"
    # The writer pads the file's end.
    length = GgufHeader.read(tmp_path / "whole.gguf").tensors[STORED_DOWN]
    for size in range(length.offset + length.num_bytes):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GgufHeader.read(path)


def test_no_damaged_byte_of_a_header_is_more_than_an_error(tmp_path: Path) -> None:
    whole = _write(tmp_path / "whole.gguf", {STORED_DOWN: (_blocks("Q8_0", 2, 32), "Q8_0")}).read_bytes()
    header = GgufHeader.read(tmp_path / "whole.gguf").tensors[STORED_DOWN].offset
    path = tmp_path / "damaged.gguf"
    told = 0
    for at in range(header):
        for value in (0x7F, 0xFF):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                GgufHeader.read(path)
            except ModelError:
                told += 1
    assert told > header
