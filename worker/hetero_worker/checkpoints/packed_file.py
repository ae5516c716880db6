"""File format of one packed matrix: a header that describes it, then the parts of its memory.

    mark, 16 bytes | header's length, 8 | header's checksum, 8 | header, JSON | parts, each at a multiple of 4,096

The header holds a checksum (crc32) of each piece of the parts. Files are not synced: after a power cut a file may be
short or contain zeros, and the checksums detect it. Several threads read the pieces, each straight to its place, so
these threads touch the memory first, and check a piece while it is in a core's cache.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import torch

from hetero_api.weight_format import WeightFormat

_MARK: Final = b"hetero packed 1\n"
_NUMBER_BYTES: Final = 8
_LONGEST_HEADER: Final = 1 << 24
_ALIGNMENT: Final = 4096
_PIECE: Final = 1 << 22
"""Bytes of a piece: whole huge pages."""
PARTIAL_SUFFIX: Final = ".partial"
"""Suffix of a file that is being written."""

RunAll = Callable[[Callable[["_Piece"], int], "list[_Piece]"], Iterable[int]]
"""`map`, or a pool's."""


class DamagedFileError(Exception):
    """A file's content is not valid; the message says what is wrong."""


class _Piece(NamedTuple):
    """Bytes of a part, and their offset in the file from the first part on."""

    bytes: memoryview
    offset: int


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """Description of a file's matrix."""

    question: str
    """Text that identifies the matrix: its source, and how it was packed."""
    weights: WeightFormat
    shape: tuple[int, int]
    """(out, in)."""
    sizes: tuple[int, ...]
    """Size of each part."""
    sums: tuple[int, ...]
    """crc32 of each piece, part by part."""

    @classmethod
    def of(
        cls, question: str, weights: WeightFormat, shape: tuple[int, int], parts: Sequence[torch.Tensor], run: RunAll
    ) -> PackedHeader:
        """Describe these uint8 tensors."""
        sums = tuple(run(lambda piece: zlib.crc32(piece.bytes), list(_pieces(parts))))
        return cls(question, weights, shape, tuple(part.nbytes for part in parts), sums)

    def encoded(self) -> bytes:
        """Return the file's beginning, padded up to its first part."""
        header = json.dumps(asdict(self)).encode()
        numbers = (number.to_bytes(_NUMBER_BYTES, "little") for number in (len(header), zlib.crc32(header)))
        whole = _MARK + b"".join(numbers) + header
        return whole + bytes(_aligned(len(whole)) - len(whole))


def write_packed(path: Path, header: PackedHeader, parts: Sequence[torch.Tensor]) -> None:
    """Write the file atomically. Raises OSError."""
    fd, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=PARTIAL_SUFFIX)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            _write_all(file, memoryview(header.encoded()))
            for part in parts:
                _write_all(file, part.numpy().data)
                file.seek(_aligned(file.tell()))
            file.truncate()
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read_header(file: BinaryIO) -> tuple[PackedHeader, int]:
    """Return the header, and the offset of the first part. Raises DamagedFileError, OSError."""
    if file.read(len(_MARK)) != _MARK:
        raise DamagedFileError("it does not begin with the mark of packed weights")
    length, checksum = (int.from_bytes(file.read(_NUMBER_BYTES), "little") for _ in range(2))
    encoded = file.read(min(length, _LONGEST_HEADER))
    if len(encoded) != length or zlib.crc32(encoded) != checksum:
        raise DamagedFileError("its header's checksum is wrong")
    try:
        fields = json.loads(encoded)
        header = PackedHeader(
            question=fields["question"],
            weights=WeightFormat(**fields["weights"]),
            shape=(int(fields["shape"][0]), int(fields["shape"][1])),
            sizes=tuple(map(int, fields["sizes"])),
            sums=tuple(map(int, fields["sums"])),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedFileError(f"its header cannot be read: {error!r}") from error
    return header, _aligned(file.tell())


def read_parts(file: BinaryIO, header: PackedHeader, begin: int, parts: Sequence[torch.Tensor], *, run: RunAll) -> None:
    """Read the parts into uint8 tensors of the header's sizes. Raises DamagedFileError, OSError."""
    if tuple(part.nbytes for part in parts) != header.sizes:
        raise DamagedFileError(f"its parts are of {header.sizes} bytes")

    def read(piece: _Piece) -> int:
        filled = 0
        while filled < len(piece.bytes):
            found = os.preadv(file.fileno(), [piece.bytes[filled:]], begin + piece.offset + filled)
            if not found:
                raise DamagedFileError("it ends too early")
            filled += found
        return zlib.crc32(piece.bytes)

    if tuple(run(read, list(_pieces(parts)))) != header.sums:
        raise DamagedFileError("its checksums are wrong")


def _pieces(parts: Sequence[torch.Tensor]) -> Iterator[_Piece]:
    offset = 0
    for part in parts:
        view = part.numpy().data
        for begin in range(0, len(view), _PIECE):
            yield _Piece(view[begin : begin + _PIECE], offset + begin)
        offset = _aligned(offset + len(view))


def _write_all(file: BinaryIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
