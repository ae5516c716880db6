"""Digests of a model's files, by which ranks show one another that they read the same weights before they do.

Each rank reads its own slices only, so ranks with different weights would compute nonsense together and never notice.
To hash all bytes takes as long as to load them. So a file of weights counts by its size, its header and blocks at even
distances, whatever is in them: tens of milliseconds for a model of some gigabytes, and the same on every rank. Two
trainings of one model change nearly all blocks. Small files count by all of their bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hetero_api.errors import unreadable_model
from hetero_api.gguf_model import gguf_files
from hetero_api.model_config import CONFIG_FILE
from hetero_api.model_directory import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    WEIGHTS_INDEX,
    model_file,
    read_model_file,
    read_source,
)
from hetero_api.packed_weights import MODELOPT_FILE
from hetero_worker.checkpoints.safetensors_store import LENGTH_BYTES, safetensors_files

_SMALL_FILES: Final = {CONFIG_FILE: MAX_CONFIG_BYTES, MODELOPT_FILE: MAX_CONFIG_BYTES, WEIGHTS_INDEX: MAX_INDEX_BYTES}
_GGUF_HEAD_BYTES: Final = (16 << 20, 1 << 20)
"""Bytes at the begin of a model's first GGUF file, whose header holds the tokenizer, and of its further ones."""
_BLOCK_BYTES: Final = 4096
_BLOCKS: Final = 512
"""Sampled blocks of all files together, as far as each gets its least number."""
_LEAST_BLOCKS: Final = 4
_HUB_SNAPSHOTS: Final = "snapshots"


def sampled_digests(directory: Path) -> dict[str, bytes]:
    """Return a sha256 of each file that a model's weights are read from, by the file's name, sorted.

    Files that are not there are left out. Raises ModelError.
    """
    try:
        ggufs = gguf_files(directory)
        weights = ggufs or safetensors_files(directory)
        blocks = max(_LEAST_BLOCKS, _BLOCKS // max(1, len(weights)))
        digests = {
            name: hashlib.sha256(read_model_file(directory / name, max_bytes=limit)).digest()
            for name, limit in _SMALL_FILES.items()
            if (directory / name).exists()
        }
        for number, path in enumerate(weights):
            head = _GGUF_HEAD_BYTES[min(number, 1)] if ggufs else None
            digests[path.name] = _digest_of_weights(path, head_bytes=head, blocks=blocks)
    except OSError as error:
        raise unreadable_model(Path(error.filename or directory), error) from error
    return dict(sorted(digests.items()))


def resolved_revision(directory: Path) -> str:
    """Return the commit that the Hub resolved, or the checksum of a converted model's source; "" if unknown.

    Raises ModelError if the source's file is a link out of the directory.
    """
    real = directory.resolve()
    if real.parent.name == _HUB_SNAPSHOTS:
        return real.name
    source = read_source(directory)
    return "" if source is None else str(source.sha256)


def differing_files(ours: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> list[str]:
    """Return the names of the files that only one of two directories has, or that differ, sorted."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _digest_of_weights(path: Path, *, head_bytes: int | None, blocks: int) -> bytes:
    """Return the digest of a file of weights. `head_bytes` None: a safetensors file, which says how long its head is.

    Raises ModelError and OSError.
    """
    digest = hashlib.sha256()
    with model_file(path).open("rb", buffering=0) as file:
        descriptor = file.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # or blocks would be read ahead in vain
        size = os.fstat(descriptor).st_size
        digest.update(size.to_bytes(8, "little"))
        if head_bytes is None:
            length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
            head_bytes = LENGTH_BYTES + min(length, MAX_HEADER_BYTES)
        digest.update(os.pread(descriptor, min(head_bytes, size), 0))
        for offset in _offsets(size, blocks):
            digest.update(os.pread(descriptor, _BLOCK_BYTES, offset))
    return digest.digest()


def _offsets(size: int, blocks: int) -> list[int]:
    """Return where blocks at even distances begin, the last one at the file's end."""
    last = max(0, size - _BLOCK_BYTES)
    return sorted({last * number // (blocks - 1) for number in range(blocks)})
