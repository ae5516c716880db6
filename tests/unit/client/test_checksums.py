"""What makes a file of a snapshot a good one, and what is remembered of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from hetero_client.errors import DamagedFileError
from hetero_client.model_store.hub import read_manifest, verify_snapshot

pytestmark = pytest.mark.unit

LARGE, SMALL = b"weights" * 100, b"{}"


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """As the Hub's cache lays it out: links to blobs that are named by their checksums."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "c0ffee"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for name, content, blob in (
        ("model.safetensors", LARGE, hashlib.sha256(LARGE).hexdigest()),
        ("config.json", SMALL, git_sha1(SMALL)),
    ):
        (blobs / blob).write_bytes(content)
        (folder / name).symlink_to(blobs / blob)
    return folder


def test_good_files_are_noted_with_their_sha256(snapshot: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m" / "c0ffee.json"
    records = verify_snapshot(snapshot, manifest)
    assert {name: record.sha256 for name, record in records.items()} == {
        "config.json": hashlib.sha256(SMALL).hexdigest(),
        "model.safetensors": hashlib.sha256(LARGE).hexdigest(),
    }
    assert read_manifest(manifest) == records
    assert [path.name for path in manifest.parent.iterdir()] == ["c0ffee.json"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_is_told_and_removed(name: str, snapshot: Path, tmp_path: Path) -> None:
    blob = (snapshot / name).resolve()
    blob.write_bytes(b"X" + blob.read_bytes()[1:])
    with pytest.raises(DamagedFileError, match=f"{name}: was damaged"):
        verify_snapshot(snapshot, tmp_path / "m.json")
    assert not blob.exists()
    assert not (snapshot / name).is_symlink()


def test_what_has_not_changed_is_not_read_again(snapshot: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    verify_snapshot(snapshot, manifest)
    entries = json.loads(manifest.read_text())
    entries["files"]["model.safetensors"]["sha256"] = "as noted"
    manifest.write_text(json.dumps(entries))
    assert verify_snapshot(snapshot, manifest)["model.safetensors"].sha256 == "as noted"
    thorough = verify_snapshot(snapshot, manifest, thoroughly=True)
    assert thorough["model.safetensors"].sha256 == hashlib.sha256(LARGE).hexdigest()


def test_what_has_changed_is_read_again(snapshot: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    verify_snapshot(snapshot, manifest)
    (snapshot / "model.safetensors").resolve().write_bytes(LARGE[:-1])
    with pytest.raises(DamagedFileError):
        verify_snapshot(snapshot, manifest)


def test_files_without_a_telling_name_are_held_to_what_was_noted(tmp_path: Path) -> None:
    folder, manifest = tmp_path / "copy", tmp_path / "m.json"
    folder.mkdir()
    (folder / "config.json").write_bytes(SMALL)  # a disk without links holds copies
    verify_snapshot(folder, manifest)
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(DamagedFileError):
        verify_snapshot(folder, manifest)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {"a": 1}}', '{"files": {"a": {"sha256": 1}}}'])
def test_a_manifest_that_cannot_be_read_only_costs_another_check(text: str, snapshot: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    manifest.write_text(text)
    assert read_manifest(manifest) == {}
    assert set(verify_snapshot(snapshot, manifest)) == {"config.json", "model.safetensors"}


def test_a_tokenizer_only_fetch_leaves_the_notes_of_a_whole_one(snapshot: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    verify_snapshot(snapshot, manifest)
    (snapshot / "model.safetensors").unlink()
    assert set(verify_snapshot(snapshot, manifest)) == {"config.json", "model.safetensors"}
