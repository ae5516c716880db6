"""One packed matrix in a file: a header that says what it is, then the parts of its memory as they are.

    mark, 16 bytes | length of the header, 8 | its sum, 8 | header, JSON | parts, each from a multiple of 4,096 on

The header has a sum (crc32) of each piece of the parts. Files are not synced: after a power cut one may be short, or
have zeros in it, and then a sum is not right. Pieces are read by several threads, each straight to where it is to lie,
so that memory is first touched by those; they are checked while they are in a core's cache.
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
"""Bytes; whole huge pages."""
PARTIAL_SUFFIX: Final = ".partial"
"""Of a file that is being written."""

RunAll = Callable[[Callable[["_Piece"], int], "list[_Piece]"], Iterable[int]]
"""`map`, or a pool's."""


class DamagedFileError(Exception):
    """The text says what is wrong with it."""


class _Piece(NamedTuple):
    """Of a part, and where it lies in the file, from the first part on."""

    bytes: memoryview
    offset: int


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """What a file says of itself."""

    question: str
    """What the matrix was made from, and how."""
    weights: WeightFormat
    shape: tuple[int, int]
    """(out, in)."""
    sizes: tuple[int, ...]
    """Bytes of each part."""
    sums: tuple[int, ...]
    """crc32 of each piece, part after part."""

    @classmethod
    def of(
        cls, question: str, weights: WeightFormat, shape: tuple[int, int], parts: Sequence[torch.Tensor], run: RunAll
    ) -> PackedHeader:
        """`parts`: uint8 tensors."""
        sums = tuple(run(lambda piece: zlib.crc32(piece.bytes), list(_pieces(parts))))
        return cls(question, weights, shape, tuple(part.nbytes for part in parts), sums)

    def encoded(self) -> bytes:
        """With what a file begins with, filled up to where the first part begins."""
        header = json.dumps(asdict(self)).encode()
        numbers = (number.to_bytes(_NUMBER_BYTES, "little") for number in (len(header), zlib.crc32(header)))
        whole = _MARK + b"".join(numbers) + header
        return whole + bytes(_aligned(len(whole)) - len(whole))


def write_packed(path: Path, header: PackedHeader, parts: Sequence[torch.Tensor]) -> None:
    """Whoever looks for the file finds all of it or nothing. Raises OSError."""
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
    """And where the first part begins. Raises DamagedFileError, OSError."""
    if file.read(len(_MARK)) != _MARK:
        raise DamagedFileError("it does not begin as such a file does")
    length, told_sum = (int.from_bytes(file.read(_NUMBER_BYTES), "little") for _ in range(2))
    encoded = file.read(min(length, _LONGEST_HEADER))
    if len(encoded) != length or zlib.crc32(encoded) != told_sum:
        raise DamagedFileError("its header's sum is not that of what is in it")
    try:
        told = json.loads(encoded)
        header = PackedHeader(
            question=told["question"],
            weights=WeightFormat(**told["weights"]),
            shape=(int(told["shape"][0]), int(told["shape"][1])),
            sizes=tuple(map(int, told["sizes"])),
            sums=tuple(map(int, told["sums"])),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedFileError(f"its header cannot be read: {error!r}") from error
    return header, _aligned(file.tell())


def read_parts(file: BinaryIO, header: PackedHeader, begin: int, parts: Sequence[torch.Tensor], *, run: RunAll) -> None:
    """Into uint8 tensors of the header's sizes. Raises DamagedFileError, OSError."""
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
        raise DamagedFileError("its sums are not those of what is in it")


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
