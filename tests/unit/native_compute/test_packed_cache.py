"""Packed weights that are kept on disk are those that a fresh load packs, or they are not used."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import INT8, WeightFormat, int4
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.checkpoints import content as checkpoint_content
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.packed_cache import SUFFIX, PackedCache
from hetero_worker.checkpoints.packed_file import PARTIAL_SUFFIX
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.native_linear import NativeLinear, NativeWeight
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.profile_run import checksum
from hetero_worker.runners.shard import load_shard
from tests.support.native_compute import compute_library, computing_with, op_queue_of
from tests.support.rank_shares import Shares
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

OUTPUTS, INPUTS = 75, 320
FORMATS: Final = (INT8, WeightFormat(8), int4(32), int4(64), int4(128))


class ReadingKernel(NativeLinear):
    """Must not pack."""

    def pack_quantized(self, matrix: QuantizedMatrix) -> NativeWeight:
        raise AssertionError(f"a matrix of {matrix.shape} was packed that lies on the disk")


def _save(directory: Path, *, seed: int = 1) -> Path:
    generator = torch.Generator().manual_seed(seed)
    names = ("q", "k")
    tensors = {f"{name}.weight": torch.randn(OUTPUTS, INPUTS, generator=generator).bfloat16() for name in names}
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return directory


def _cache(folder: Path, *, limit_bytes: int | None = None) -> PackedCache:
    """For which no checkpoint is too young."""
    return PackedCache(folder, limit_bytes=limit_bytes, clock_ns=lambda: time.time_ns() + 3_600_000_000_000)


def _parts(weights: WeightFormat, *, rows: UnitRange | None = None) -> list[TensorSlice]:
    shape = (OUTPUTS, INPUTS)
    return [TensorSlice(f"{name}.weight", shape, rows=rows, quantize_to=weights) for name in ("q", "k")]


def _load(
    directory: Path,
    cache: PackedCache | None,
    parts: Sequence[TensorSlice] | None = None,
    kernel: NativeLinear | None = None,
) -> NativeWeight:
    linear = ShardedLinear(parts or _parts(INT8))
    with Checkpoint(directory, cache) as checkpoint:
        linear.load(checkpoint, dtype=torch.float32, kernel=kernel or NativeLinear(op_queue_of()))
    assert isinstance(linear.packed, NativeWeight)
    return linear.packed


def _reading() -> ReadingKernel:
    return ReadingKernel(op_queue_of())


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _same(one: NativeWeight, other: NativeWeight) -> bool:
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(4))
    are_same = [torch.equal(a, b) for a, b in zip(one.memory, other.memory, strict=True)]
    return all(are_same) and one.shape == other.shape and torch.equal(one(x, None), other(x, None))


@pytest.mark.parametrize("weights", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [None, UnitRange(7, 40)])
def test_what_was_kept_is_what_a_fresh_load_packs(
    tmp_path: Path, weights: WeightFormat, rows: UnitRange | None
) -> None:
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    parts = _parts(weights, rows=rows)
    for isa in compute_library().isas:
        with computing_with(isa):
            fresh = _load(model, None, parts)
            assert _same(_load(model, cache, parts), fresh)
            assert _same(_load(model, cache, parts, _reading()), fresh)


def test_large_parts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    monkeypatch.setattr("hetero_worker.checkpoints.packed_file._PIECE", 4096)
    fresh = _load(model, cache)
    assert _same(_load(model, cache, kernel=_reading()), fresh)


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": UnitRange(0, 40)},
        {"columns": UnitRange(0, 64)},
        {"quantize_to": int4()},
        {"quantize_to": WeightFormat(8)},
        {"name": "k.weight"},
    ],
    ids=str,
)
def test_another_part_or_format_is_another_matrix(tmp_path: Path, changed: dict[str, object]) -> None:
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    first = _parts(INT8)[:1]
    _load(model, cache, first)
    parts = [replace(part, **changed) for part in first]  # type: ignore[arg-type]
    found = _load(model, cache, parts)
    fresh = _load(model, None, parts)
    assert all(torch.equal(a, b) for a, b in zip(found.memory, fresh.memory, strict=True))
    assert len(_files(tmp_path / "packed")) == 2


def test_another_layout_is_another_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    _load(model, cache)
    monkeypatch.setattr(NativeLinear, "layout", "of another build")
    with pytest.raises(AssertionError, match="was packed"):
        _load(model, cache, kernel=_reading())


def test_a_checkpoint_that_was_written_anew_is_packed_anew(tmp_path: Path) -> None:
    """In place, as long as it was, and with the date that it had."""
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    file, other = model / "model.safetensors", _save(tmp_path / "other", seed=2) / "model.safetensors"
    old, before = _load(model, cache), file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock has ticked
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    found = _load(model, cache)
    assert _same(found, _load(model, None))
    assert not _same(found, old)


def test_a_checkpoint_that_was_replaced_is_packed_anew(tmp_path: Path) -> None:
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    _load(model, cache)
    os.replace(_save(tmp_path / "other", seed=2) / "model.safetensors", model / "model.safetensors")
    assert _same(_load(model, cache), _load(model, None))


def test_a_checkpoint_that_changes_while_it_is_read_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"
    with Checkpoint(model, _cache(folder)) as checkpoint:
        ShardedLinear(_parts(INT8)).load(checkpoint, dtype=torch.float32, kernel=NativeLinear(op_queue_of()))
        assert len(_files(folder)) == 1
        os.replace(_save(tmp_path / "other", seed=2) / "model.safetensors", model / "model.safetensors")
    assert "changed while it was read" in caplog.text
    assert _files(folder) == []


def _cut_short(told: bytes) -> bytes:
    return told[:40]


def _turned_around(told: bytes) -> bytes:
    """Another content, of nobody."""
    return told[64:0:-1] + told[64:]


def _not_read(*_arguments: object, **_named: object) -> str:
    raise AssertionError("a checkpoint was read that is known")


def test_a_copy_shares_what_was_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read once to know it, in threads piece by piece, and not again."""
    monkeypatch.setattr(checkpoint_content, "_PIECE", 5000)
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    fresh = _load(model, cache)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert _same(_load(copy, cache, kernel=_reading()), fresh)
    monkeypatch.setattr(checkpoint_content, "digest_of", _not_read)
    for directory in (model, copy):
        assert _same(_load(directory, cache, kernel=_reading()), fresh)


@pytest.mark.parametrize("change", ["a name", "a byte", "the config"])
def test_what_differs_in_anything_is_another_checkpoint(tmp_path: Path, change: str) -> None:
    model, other = _save(tmp_path / "model"), _save(tmp_path / "other")
    file = other / "model.safetensors"
    content = file.read_bytes()
    if change == "a name":
        file.rename(other / "weights.safetensors")
    elif change == "a byte":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (other / "config.json").write_text("{}")
    one, two = (checkpoint_content.digest_of(directory, run=map) for directory in (model, other))
    assert one != two


@pytest.mark.parametrize("damage", [_cut_short, _turned_around, lambda told: bytes(len(told))])
def test_what_was_remembered_wrongly_is_read_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"
    fresh = _load(model, _cache(folder))
    (known,) = folder.glob(f"*{checkpoint_content.SUFFIX}")
    told = known.read_bytes()
    known.write_bytes(damage(told))
    assert _same(_load(model, _cache(folder), kernel=_reading()), fresh)
    assert known.read_bytes() == told


def test_what_was_remembered_long_ago_goes(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    _load(_save(tmp_path / "model"), _cache(folder))
    (known,) = folder.glob(f"*{checkpoint_content.SUFFIX}")
    os.utime(known, (time.time() - 91 * 86400,) * 2)
    _load(_save(tmp_path / "other", seed=2), _cache(folder))
    assert not known.exists()


def test_a_checkpoint_that_changes_while_its_content_is_read_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"
    _load(model, _cache(folder))
    for known in folder.glob(f"*{checkpoint_content.SUFFIX}"):
        known.unlink()

    def read_and_replace(directory: Path, *, run: checkpoint_content.RunAll) -> str:
        digest = digest_of(directory, run=run)
        os.replace(_save(tmp_path / "other", seed=2) / "model.safetensors", model / "model.safetensors")
        return digest

    digest_of = checkpoint_content.digest_of
    monkeypatch.setattr(checkpoint_content, "digest_of", read_and_replace)
    with pytest.raises(AssertionError, match="was packed"):
        _load(model, _cache(folder), kernel=_reading())
    assert "changed while it was read" in caplog.text
    assert list(folder.glob(f"*{checkpoint_content.SUFFIX}")) == []


def test_nothing_is_kept_of_a_checkpoint_that_was_written_just_now(tmp_path: Path) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"
    _load(model, PackedCache(folder, clock_ns=lambda: (model / "model.safetensors").stat().st_ctime_ns + 10**9))
    assert not folder.exists()


def _cut(content: bytes) -> bytes:
    return content[:-5000]


def _empty(_content: bytes) -> bytes:
    return b""


def _flip(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _flip_in_header(content: bytes) -> bytes:
    at = content.index(b'"shape"') + 10
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _zeros(content: bytes) -> bytes:
    """As after a power cut."""
    return content[:8192] + bytes(len(content) - 8192)


def _garbage(content: bytes) -> bytes:
    return bytes(len(content))


@pytest.mark.parametrize("damage", [_cut, _empty, _flip, _flip_in_header, _zeros, _garbage], ids=lambda f: f.__name__)
def test_a_damaged_file_is_told_and_made_anew(tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(damage)
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    fresh = _load(model, cache)
    (file,) = _files(tmp_path / "packed")
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert _same(_load(model, cache), fresh)
    assert str(file) in caplog.text
    assert file.read_bytes() == content
    assert _same(_load(model, cache, kernel=_reading()), fresh)


def test_a_file_of_another_matrix_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    _load(model, cache, _parts(INT8)[:1])
    (first,) = _files(tmp_path / "packed")
    _load(model, cache, _parts(INT8)[1:])
    (second,) = set(_files(tmp_path / "packed")) - {first}
    os.replace(second, first)
    assert _same(_load(model, cache, _parts(INT8)[:1]), _load(model, None, _parts(INT8)[:1]))
    assert "of another matrix" in caplog.text


def test_a_folder_that_cannot_be_written_ends_no_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, no_folder = _save(tmp_path / "model"), tmp_path / "file"
    no_folder.write_text("no folder")
    with Checkpoint(model, _cache(no_folder)) as checkpoint:
        for part in _parts(INT8):
            ShardedLinear([part]).load(checkpoint, dtype=torch.float32, kernel=NativeLinear(op_queue_of()))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [str(no_folder) in record.getMessage() for record in warnings] == [True]


def test_a_folder_that_is_only_to_be_read_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = _save(tmp_path / "model"), _cache(tmp_path / "packed")
    fresh = _load(model, cache)

    def refused(*_arguments: object, **_options: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr("hetero_worker.checkpoints.packed_file.tempfile.mkstemp", refused)
    monkeypatch.setattr("hetero_worker.checkpoints.packed_cache.os.utime", refused)
    assert _same(_load(model, cache, kernel=_reading()), fresh)
    other = _parts(int4())
    assert _same(_load(model, cache, other), _load(model, None, other))


def test_a_disk_that_is_full_ends_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"

    def full(_file: object, _view: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hetero_worker.checkpoints.packed_file._write_all", full)
    assert _same(_load(model, _cache(folder)), _load(model, None))
    assert "No space left on device" in caplog.text
    assert list(folder.iterdir()) == []


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    models = [_save(tmp_path / f"model{i}", seed=i) for i in range(3)]
    size = sum(part.nbytes for part in _load(models[0], None).memory)
    limited = _cache(folder, limit_bytes=int(2.5 * size) + 3 * 8192)
    for age, model in ((300, models[0]), (200, models[1])):
        before = set(_files(folder))
        _load(model, limited)
        (made,) = set(_files(folder)) - before
        os.utime(made, (time.time() - age,) * 2)
    _load(models[0], limited, kernel=_reading())  # used just now
    _load(models[2], limited)
    for kept in (models[0], models[2]):
        _load(kept, limited, kernel=_reading())
    with pytest.raises(AssertionError, match="was packed"):
        _load(models[1], limited, kernel=_reading())


def test_a_model_larger_than_the_limit_is_packed_each_time(tmp_path: Path) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"
    assert _same(_load(model, _cache(folder, limit_bytes=1000)), _load(model, None))
    assert _files(folder) == []


def test_files_that_were_begun_and_abandoned_go(tmp_path: Path) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"
    folder.mkdir()
    abandoned, begun = (folder / f".{name}{PARTIAL_SUFFIX}" for name in ("old", "new"))
    for path in (abandoned, begun):
        path.touch()
    os.utime(abandoned, (time.time() - 7200,) * 2)
    _load(model, _cache(folder))
    assert not abandoned.exists()
    assert begun.exists()


def _load_elsewhere(model: Path, folder: Path) -> list[bytes]:
    """In a process of its own."""
    return [part.numpy().tobytes() for part in _load(model, _cache(folder)).memory]


def test_processes_load_at_once(tmp_path: Path) -> None:
    model, folder = _save(tmp_path / "model"), tmp_path / "packed"
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        loads = [pool.submit(_load_elsewhere, model, folder) for _ in range(6)]
        found = [load.result(timeout=120) for load in loads]
    fresh = [part.numpy().tobytes() for part in _load(model, None).memory]
    assert found == [fresh] * 6
    assert len(_files(folder)) == 1
    assert len(list(folder.iterdir())) == 2  # and what is in the directory


@pytest.mark.parametrize("variant", ["llama-biased", "qwen3", "qwen3-moe-some-dense"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rank_that_starts_again_computes_the_same(tmp_path: Path, variant: str, quantization: str) -> None:
    directory = save_tiny(variant, tmp_path / "model").directory
    config = ModelConfig.from_directory(directory).quantized(quantization)
    cache = _cache(tmp_path / "packed")
    shares = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
    request = LoadRequest(
        directory=directory, config=config, dtype="float32",
        shard_plan=shares.plan_for(config), rank=0,
        max_model_len=64, max_num_batched_tokens=64, max_num_seqs=2, memory_bytes=1 << 32,
        open_weights=lambda path: Checkpoint(path, cache),
    )  # fmt: skip
    backend = cpu_backend()
    kernels = (NativeLinear(op_queue_of()), _reading())
    sums = [checksum(load_shard(request, backend, kernel=kernel)) for kernel in kernels]
    assert sums[0] == sums[1]
