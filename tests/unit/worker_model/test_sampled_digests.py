"""What ranks say about the files that they will read: the same for copies, other for other weights, and cheap."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from hetero_api.errors import ModelError
from hetero_api.model_directory import ModelSource, write_source
from hetero_worker.checkpoints.sampled_digests import differing_files, resolved_revision, sampled_digests

pytestmark = pytest.mark.unit

INDEX: Final = "model.safetensors.index.json"
HUGE: Final = 8 << 30


def save(directory: Path, *, seed: int = 0) -> Path:
    """A checkpoint of three files; nobody asks what its tensors are."""
    generator, weight_map = torch.Generator().manual_seed(seed), {}
    for name in ("a", "b", "c"):
        file = weight_map[name] = f"model-{name}.safetensors"
        save_file({name: torch.randn(100, 200, generator=generator)}, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def copied(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copied"))


def change(path: Path, offset: int) -> None:
    """Turn one bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_copies_are_the_same_whatever_else_lies_beside_them(sharded: Path, copied: Path) -> None:
    (copied / "README.md").write_text("another page")
    (copied / "tokenizer.json").write_text("{}")
    (copied / "consolidated.safetensors").write_bytes(b"no file of the index")

    digests = sampled_digests(copied)

    shards = {path.name for path in sharded.glob("*.safetensors")}
    assert len(shards) > 1
    assert digests == sampled_digests(sharded)
    assert digests.keys() == {"config.json", INDEX, *shards}


@pytest.mark.parametrize("place", ["config.json", INDEX, "header", "first weight", "last weight", "size"])
def test_a_change_shows_in_its_file(sharded: Path, copied: Path, place: str) -> None:
    shard = sorted(copied.glob("*.safetensors"))[1]
    header_bytes = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    match place:
        case "header":
            change(shard, header_bytes - 20)
        case "first weight":
            change(shard, header_bytes)
        case "last weight":
            change(shard, shard.stat().st_size - 1)
        case "size":
            os.truncate(shard, shard.stat().st_size + 1)
        case _:
            (copied / place).write_text((copied / place).read_text() + " ")
    named = shard.name if (copied / place).suffix != ".json" else place

    assert differing_files(sampled_digests(sharded), sampled_digests(copied)) == [named]


def test_weights_of_another_training_differ_in_every_file_of_weights(sharded: Path, tmp_path: Path) -> None:
    assert differing_files(sampled_digests(sharded), sampled_digests(save(tmp_path, seed=1))) == sorted(
        path.name for path in sharded.glob("*.safetensors")
    )


@pytest.mark.parametrize("place", [100, -1], ids=["header", "last weight"])
def test_a_gguf_file_counts_by_its_header_and_its_blocks(tmp_path: Path, place: int) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" * 100_000)
    before = sampled_digests(tmp_path)

    assert before.keys() == {path.name}
    change(path, place % path.stat().st_size)
    assert differing_files(before, sampled_digests(tmp_path)) == [path.name]


def test_all_parts_of_a_split_gguf_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path in parts:
        path.write_bytes(b"GGUF")
    before = sampled_digests(tmp_path)

    assert list(before) == [path.name for path in parts]
    parts[1].write_bytes(b"GGUG")
    assert differing_files(before, sampled_digests(tmp_path)) == [parts[1].name]


@pytest.mark.parametrize("name", ["model.safetensors", "large.gguf"])
def test_little_of_a_large_file_is_read(tmp_path: Path, name: str) -> None:
    large = tmp_path / name
    large.write_bytes((1 << 20).to_bytes(8, "little"))
    os.truncate(large, HUGE)
    before = _bytes_read()
    digests = sampled_digests(tmp_path)

    assert list(digests) == [name]
    assert _bytes_read() - before < 40 << 20
    change(large, HUGE - 1)
    assert differing_files(digests, sampled_digests(tmp_path)) == [name]


def _bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_directory_without_weights_counts_by_its_config(tmp_path: Path) -> None:
    assert sampled_digests(tmp_path) == {}
    (tmp_path / "config.json").write_text("{}")
    assert sampled_digests(tmp_path).keys() == {"config.json"}


def test_an_index_of_a_file_that_is_missing_is_an_error(copied: Path) -> None:
    missing = max(copied.glob("*.safetensors"))
    missing.unlink()
    with pytest.raises(ModelError, match=f"names {missing.name}, which is not in the directory"):
        sampled_digests(copied)


def test_a_link_out_of_the_directory_is_an_error(copied: Path, tmp_path: Path) -> None:
    shard = max(copied.glob("*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="outside the model directory"):
        sampled_digests(copied)


def test_the_revision_is_the_hubs_or_that_of_the_original_file(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    converted = tmp_path / "converted"
    converted.mkdir()
    write_source(converted, ModelSource("pypi://p/m", origin="wheel", note="", sha256="f00d", dtype="float32"))

    assert resolved_revision(tmp_path / "link") == "0a1b2c"
    assert resolved_revision(converted) == "f00d"
    assert resolved_revision(tmp_path) == ""
