"""A fuzz target: what reads the bytes, which errors are right answers to bad ones, and how good ones are changed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.support.mutations import HOSTILE_NUMBERS, mutated_bytes, mutated_json, parsed_or_none

_LENGTH = struct.Struct("<BH")
"""Frames of a conversation: who speaks, and the bytes that follow."""
_TEXTS = ("", "x", "\0", "cpu", "../..", "x" * 300, "é€🙂")


def _changed_bytes(data: bytes, random_: random.Random) -> bytes:
    return mutated_bytes(data, random_) if data else random_.randbytes(8)


@dataclass(frozen=True, slots=True)
class Target:
    """One reader of bytes from elsewhere. Any error but `refusals`, and a hang, is a finding."""

    name: str
    run: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Callable[[bytes, random.Random], bytes] = _changed_bytes

    def check(self, data: bytes) -> bool:
        """Read it; return whether it was taken. Raises what is a finding."""
        try:
            self.run(data)
        except self.refusals:
            return False
        return True


def changed_json(data: bytes, random_: random.Random) -> bytes:
    """One value of a JSON text changed; of what is no JSON, one byte."""
    value = parsed_or_none(data)
    return mutated_json(value, random_) if isinstance(value, dict | list) and value else _changed_bytes(data, random_)


def changed_message(kind: type[Message]) -> Callable[[bytes, random.Random], bytes]:
    """Return a mutation of a serialised message: one field of it, or of one within it."""

    def mutate(data: bytes, random_: random.Random) -> bytes:
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return _changed_bytes(data, random_)
        _change(message, random_)
        return message.SerializeToString()

    return mutate


def _change(message: Any, random_: random.Random) -> None:
    """Go down to some field and set it, repeat it, or clear it."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    present = [field for field, _ in message.ListFields()]
    field = random_.choice(present if present and random_.random() < 0.8 else fields)
    if field.message_type is not None and not field.message_type.GetOptions().map_entry:
        _change_within(message, field, random_)
    elif random_.random() < 0.1 or field.message_type is not None:
        message.ClearField(field.name)
    elif field.is_repeated:
        getattr(message, field.name).extend(_value(field, random_) for _ in range(random_.choice((1, 1, 2, 20))))
    else:
        setattr(message, field.name, _value(field, random_))


def _change_within(message: Any, field: FieldDescriptor, random_: random.Random) -> None:
    held = getattr(message, field.name)
    if not field.is_repeated:
        held.SetInParent()
        _change(held, random_)
        return
    match random_.randrange(5) if held else 0:
        case 0:
            held.add()
        case 1:
            del held[random_.randrange(len(held))]
        case 2:
            held.add().CopyFrom(random_.choice(held))
        case _:
            _change(random_.choice(held), random_)


def _value(field: FieldDescriptor, random_: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return random_.randbytes(random_.choice((0, 1, 8, 70)))
        case FieldDescriptor.CPPTYPE_STRING:
            return random_.choice(_TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return random_.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return random_.choice((0.0, 1.0, -1.0, 0.5, 1e30, float("nan"), float("inf"), -float("inf"), 1e-40))
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            return random_.choice(field.enum_type.values).number
    number = random_.choice((*HOSTILE_NUMBERS, *range(12)))
    bits = 32 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    number %= 1 << bits
    is_signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return number - (1 << bits) if is_signed and number >> (bits - 1) else number


def joined(frames: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the bytes of a conversation of messages, each with who says it."""
    return b"".join(_LENGTH.pack(speaker, len(frame)) + frame for speaker, frame in frames)


def frames_of(data: bytes) -> list[tuple[int, bytes]]:
    """Return the messages of a conversation; the last one may be cut short."""
    frames, at = [], 0
    while at + _LENGTH.size <= len(data):
        speaker, length = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        frames.append((speaker, data[at : at + length]))
        at += length
    return frames


def changed_frames(mutate: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """Return a mutation of a conversation: a message changed, lost, repeated, moved or said by another."""

    def change(data: bytes, random_: random.Random) -> bytes:
        frames = frames_of(data)
        if not frames:
            return _changed_bytes(data, random_)
        at = random_.randrange(len(frames))
        speaker, frame = frames[at]
        match random_.randrange(8):
            case 0:
                del frames[at]
            case 1:
                frames.insert(random_.randrange(len(frames)), frames[at])
            case 2:
                frames.insert(random_.randrange(len(frames)), frames.pop(at))
            case 3:
                frames[at] = (random_.randrange(4), frame)
            case _:
                frames[at] = (speaker, mutate(frame, random_)[:0xFFFF])
        return joined(frames)

    return change
