"""Bounded parsing of the messages that clients send.

Protobuf turns a message of 8 MiB into hundreds of megabytes of objects when it holds millions of tiny parts, and holds
the interpreter while it does so. `parse` therefore walks over the encoded message first, which allocates nothing, and
refuses one with too many parts. Encoding: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from hetero_gateway.server.errors import InvalidArguments, Violation

MAX_FIELDS: Final = 100_000
"""Fields of a message, those of the messages in it included."""
MAX_PACKED_BYTES: Final = 4 * 1024 * 1024
"""Encoded bytes of one list of numbers."""
_VARINT: Final = 0
_LENGTH: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
"""Wire types: a number, bytes with their length before them, and numbers of so many bytes."""
_MAX_VARINT_BYTES: Final = 10

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Return the message that `data` encodes. Raises InvalidArguments if it is malformed or has too many parts."""
    try:
        _Walk(data).message(kind.DESCRIPTOR, 0, len(data))
        return kind.FromString(data)
    except (DecodeError, IndexError) as error:
        problem = f"is no {kind.DESCRIPTOR.name} in protobuf's encoding"
        raise InvalidArguments([Violation("request", problem)]) from error


class _Walk:
    """A walk over one encoded message, with the number of fields met so far. IndexError: the message is cut short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0

    def message(self, descriptor: Any, at: int, end: int) -> None:
        """Walk over the fields in [at, end) of a message of this type."""
        nested, packed = _parts(descriptor)
        while at < end:
            key, at = self._varint(at)
            self._count()
            if key & 7 == _LENGTH:
                length, at = self._varint(at)
                if at + length > end:
                    raise IndexError
                self._delimited(key >> 3, nested, packed, at, at + length)
                at += length
            else:
                at = self._skip(key & 7, at)

    def _delimited(self, number: int, nested: dict[int, Any], packed: dict[int, str], at: int, end: int) -> None:
        if number in nested:
            self.message(nested[number], at, end)
        elif number in packed and end - at > MAX_PACKED_BYTES:
            problem = f"must have at most {MAX_PACKED_BYTES} bytes in protobuf's encoding, not {end - at}"
            raise InvalidArguments([Violation(packed[number], problem)])

    def _count(self) -> None:
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise InvalidArguments([Violation("request", f"has too many parts; at most {MAX_FIELDS} are allowed")])

    def _skip(self, wire_type: int, at: int) -> int:
        if wire_type == _VARINT:
            return self._varint(at)[1]
        if wire_type in _FIXED_BYTES:
            return at + _FIXED_BYTES[wire_type]
        raise IndexError

    def _varint(self, at: int) -> tuple[int, int]:
        """Return a number and where it ends."""
        value = shift = 0
        for byte in self._data[at : at + _MAX_VARINT_BYTES]:
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
            shift += 7
        raise IndexError


@cache
def _parts(descriptor: Any) -> tuple[dict[int, Any], dict[int, str]]:
    """Return the types of fields that are messages, and the names of those that are lists of numbers, by number."""
    nested = {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
    packed = {field.number: field.name for field in descriptor.fields if field.is_packed}
    return nested, packed
