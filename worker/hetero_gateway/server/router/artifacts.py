"""Files of which a router makes the model's tokenizer, as one zip archive."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from smg_grpc_proto.generated import common_pb2 as common

from hetero_api.hf_config import read_json
from hetero_gateway.engine.text.tokenizer import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, TextTokenizer

CHUNK_BYTES: Final = 1 << 20
CONFIG_FILE: Final = "config.json"
_FILES: Final = (
    CONFIG_FILE, "generation_config.json", "special_tokens_map.json", "tokenizer_config.json",
)  # fmt: skip
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""Date of all files, so that the archive of the same files is the same."""


def tokenizer_chunks(directory: Path, tokenizer: TextTokenizer) -> list[common.GetTokenizerChunk]:
    """Return the archive in pieces; the last one has its SHA-256. Raises OSError."""
    data = _archive(_contents(directory, tokenizer))
    pieces = [data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES)]
    chunks = [common.GetTokenizerChunk(data=piece) for piece in pieces]
    chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
    return chunks


def model_type(directory: Path) -> str:
    """Return transformers' name of the model's kind, e.g. "qwen3"; empty if its files do not name one."""
    path = directory / CONFIG_FILE
    return str(read_json(path).get("model_type", "")) if path.exists() else ""


def _contents(directory: Path, tokenizer: TextTokenizer) -> Mapping[str, bytes]:
    """Return the files by name: tokenizer and template as they are in use, whatever they were read from."""
    contents = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).exists()}
    contents[TOKENIZER_FILE] = tokenizer.to_json().encode()
    if tokenizer.has_chat_template:
        contents[CHAT_TEMPLATE_FILE] = tokenizer.chat_template.encode()
    return contents


def _archive(contents: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in _sorted(contents):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, compress_type=zipfile.ZIP_DEFLATED)
    return target.getvalue()


def _sorted(contents: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    yield from sorted(contents.items())
