"""Which files are fetched so that another process can take them up, and from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.file_download
import pytest
from huggingface_hub.hf_api import ModelInfo

from hetero_client.model_store.hub import (
    ADAPTER_PATTERNS,
    LARGEST_BYTES,
    PATTERNS,
    SMALLEST_BYTES,
    download_resumably,
    fetch_large_files,
    wanted_files,
)
from hetero_client.model_store.store import ModelKey

pytestmark = pytest.mark.unit

COMMIT = "c" * 40
SIZE = SMALLEST_BYTES + 1


class Transfers:
    """In place of the Hub's library: what it was asked for, and bytes that look like it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def __call__(self, url: str, file: Any, *, resume_size: int, headers: Any, expected_size: int) -> None:
        self.asked.append((url, resume_size))
        file.truncate(expected_size)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    transfers = Transfers()
    monkeypatch.setattr(huggingface_hub.file_download, "http_get", transfers)
    return transfers


def sibling(name: str, sha256: str, size: int = SIZE) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": "b", "lfs": {"sha256": sha256, "size": size, "pointerSize": 1}}


def fetch(folder: Path, *siblings: dict[str, Any]) -> list[str]:
    """Names in the folder of blobs."""
    told: list[str] = []
    model_info: Any = ModelInfo  # has no types
    fetch_large_files(
        ModelKey("org/tiny"), model_info(id="org/tiny", sha=COMMIT, siblings=list(siblings)),
        blobs=folder / "blobs", partials=folder / "partial", headers={}, patterns=("*.safetensors",),
        report=told.append,
    )  # fmt: skip
    return sorted(path.name for path in (folder / "blobs").glob("*"))


def test_a_file_goes_to_its_checksums_place_by_its_commit(transfers: Transfers, tmp_path: Path) -> None:
    assert fetch(tmp_path, sibling("a.safetensors", "aa")) == ["aa"]
    ((url, begin),) = transfers.asked
    assert url.endswith(f"/org/tiny/resolve/{COMMIT}/a.safetensors")
    assert begin == 0
    assert list((tmp_path / "partial").iterdir()) == []


def test_what_is_there_is_not_fetched_and_what_is_half_there_is_taken_up(transfers: Transfers, tmp_path: Path) -> None:
    for folder, name, size in (("blobs", "aa", SIZE), ("partial", "bb", 1000), ("partial", "cc", SIZE + 1)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(bytes(size))
    files = [sibling(f"{name}.safetensors", name * 2) for name in "abc"]
    assert fetch(tmp_path, *files) == ["aa", "bb", "cc"]
    assert sorted((url[-13:], begin) for url, begin in transfers.asked) == [
        ("b.safetensors", 1000),
        ("c.safetensors", 0),
    ]


def test_the_librarys_own_files_are_left_to_it(transfers: Transfers, tmp_path: Path) -> None:
    """Small ones, those that are too large for plain HTTP, those that are not wanted, and no file twice."""
    files = [
        sibling("small.safetensors", "aa", SMALLEST_BYTES - 1),
        sibling("large.safetensors", "bb", LARGEST_BYTES + 1),
        sibling("model.bin", "cc"),
        {"rfilename": "config.json", "size": SIZE, "blobId": "b"},
        sibling("one.safetensors", "dd"),
        sibling("other.safetensors", "dd"),
    ]
    assert fetch(tmp_path, *files) == ["dd"]
    assert len(transfers.asked) == 1


def test_a_model_is_fetched_once_where_its_publisher_repeats_it() -> None:
    key = ModelKey("org/tiny")
    original = ["original/config.json", "original/model--00001.safetensors", "metal/model.bin"]
    whole = ["config.json", "model.safetensors"]
    assert wanted_files(key, [*original, *whole, "consolidated.safetensors"], PATTERNS) == whole
    sharded = ["model-1.safetensors", "model.safetensors.index.json"]
    repeated = ["consolidated-1.safetensors", "consolidated.safetensors.index.json"]
    assert wanted_files(key, [*repeated, *sharded], PATTERNS) == [repeated[1], *sharded]
    # What has no other weights keeps them, so that their names are in the message.
    assert wanted_files(key, ["consolidated.safetensors"], PATTERNS) == ["consolidated.safetensors"]
    assert wanted_files(key, ["Q4/m-Q4_K_M.gguf", "config.json"], PATTERNS) == ["config.json", "Q4/m-Q4_K_M.gguf"]
    assert wanted_files(key, ["adapter_config.json", "m.gguf"], ADAPTER_PATTERNS) == ["adapter_config.json"]


def test_the_librarys_fetch_and_ours_take_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(_name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    info: Any = ModelInfo
    listed = info(id="org/tiny", siblings=[{"rfilename": n} for n in ("a[1].json", "original/b.json", "README.md")])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_args, **_settings: listed)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    download_resumably(
        ModelKey("org/tiny"), cache_dir=tmp_path, partials=tmp_path, token=None, patterns=PATTERNS, report=print
    )
    assert asked == [["a[[]1].json"]]
