"""What a checkpoint directory can have wrong, and that a rank reads its own slices only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice

pytestmark = pytest.mark.unit

WEIGHT = TensorSlice("w", (6, 4))


def _save(directory: Path) -> torch.Tensor:
    weight = torch.arange(24, dtype=torch.float32).view(6, 4)
    save_file({"w": weight.to(torch.bfloat16), "b": torch.arange(6.0)}, directory / "model.safetensors")
    return weight


@pytest.mark.parametrize(
    ("rows", "columns"), [(None, None), ((2, 5), None), (None, (1, 3)), ((0, 1), (3, 4)), ((3, 3), None)]
)
def test_slices_are_read_and_converted(
    tmp_path: Path, rows: tuple[int, int] | None, columns: tuple[int, int] | None
) -> None:
    whole = _save(tmp_path)
    part = TensorSlice(
        "w", (6, 4), rows=UnitRange(*rows) if rows else None, columns=UnitRange(*columns) if columns else None
    )
    into = torch.full(part.shape, -1.0)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read(part, into)
    assert torch.equal(into, whole[slice(*rows) if rows else slice(None), slice(*columns) if columns else slice(None)])


def test_parts_are_stacked_along_rows(tmp_path: Path) -> None:
    whole = _save(tmp_path)
    parts = [TensorSlice("w", (6, 4), rows=UnitRange(4, 6)), TensorSlice("w", (6, 4), rows=UnitRange(0, 1))]
    into = torch.empty(3, 4)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read_all(parts, into)
    assert torch.equal(into, whole[[4, 5, 0]])


def test_vectors_are_sliced(tmp_path: Path) -> None:
    _save(tmp_path)
    into = torch.empty(2)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read(TensorSlice("b", (6,), rows=UnitRange(3, 5)), into)
    assert into.tolist() == [3.0, 4.0]


def _nothing(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def _pickled(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")


def _truncated(directory: Path) -> None:
    _save(directory)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])


def _garbage(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)


def _empty(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def _other_tensor(directory: Path) -> None:
    save_file({"v": torch.zeros(2)}, directory / "model.safetensors")


def _other_shape(directory: Path) -> None:
    save_file({"w": torch.zeros(4, 6)}, directory / "model.safetensors")


def _index(content: object) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / "model.safetensors.index.json").write_text(text)

    return write


def _index_to_damaged_file(directory: Path) -> None:
    _index({"weight_map": {"w": "model-00001-of-00001.safetensors"}})(directory)
    (directory / "model-00001-of-00001.safetensors").write_bytes(b"short")


def _index_to_file_without_the_tensor(directory: Path) -> None:
    _index({"weight_map": {"w": "model-00001-of-00001.safetensors"}})(directory)
    save_file({"v": torch.zeros(2)}, directory / "model-00001-of-00001.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_nothing, ["no weights", "model.safetensors", "model.safetensors.index.json"]),
        (_pickled, ["pytorch_model.bin", "pickled", "convert", "safetensors"]),
        (_truncated, ["model.safetensors", "truncated", "fetch"]),
        (_garbage, ["model.safetensors", "damaged"]),
        (_empty, ["model.safetensors", "damaged"]),
        (_other_tensor, ["no tensor w", "config.json"]),
        (_other_shape, ["model.safetensors", "tensor w", "[4, 6]", "[6, 4]"]),
        (_index({"weight_map": {"w": "absent.safetensors"}}), ["index.json", "absent.safetensors", "fetch"]),
        (_index({"weight_map": {"w": "../outside.safetensors"}}), ["index.json", "outside.safetensors"]),
        (_index({"weight_map": {"w": "weights.bin"}}), ["index.json", "weights.bin"]),
        (_index({"weight_map": {"other": "absent.safetensors"}}), ["absent.safetensors"]),
        (_index({"weight_map": 3}), ["index.json", "weight_map"]),
        (_index({}), ["index.json", "weight_map"]),
        (_index("{nonsense"), ["index.json", "cannot be read"]),
        (_index_to_damaged_file, ["model-00001-of-00001.safetensors", "damaged"]),
        (_index_to_file_without_the_tensor, ["model-00001-of-00001.safetensors", "w"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_directory_is_told_by_name(tmp_path: Path, damage: Callable[[Path], None], words: list[str]) -> None:
    damage(tmp_path)
    with pytest.raises(ModelError) as caught, Checkpoint(tmp_path) as checkpoint:
        checkpoint.read(WEIGHT, torch.empty(6, 4))
    assert str(tmp_path) in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_absent_directory_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"), Checkpoint(tmp_path / "absent"):
        pass
