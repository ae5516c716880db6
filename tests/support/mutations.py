"""Files damaged by chance or by ill will: one small change each, drawn from a seed."""

from __future__ import annotations

import copy
import json
import random
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig

MOST_BYTES: Final = 256 << 20
"""Memory that reading a damaged file may take."""
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 4096, 65_535, 1 << 31, (1 << 63) - 1, 1 << 64, 10**400, 0.0, -0.5, 0.5,
    1e-320, 1e200, 1e308, float("nan"), float("inf"), float("-inf"), "", "x", "0", "1e9", "../../etc/passwd", "a\0b",
    "x" * 5000, "\ud800", [], [None], [1], [0, 0], ["x"], [[]], [1 << 63], {}, {"x": 1}, {"": []}, [{}], "default",
    "yarn", "llama3", "linear", "full_attention", json.loads("[" * 60 + "]" * 60),
)  # fmt: skip
HOSTILE_NUMBERS = (0, 1, 2, 8, 9, 12, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def mutated_json(value: Any, random_: random.Random) -> bytes:
    """The value as JSON text with one field changed, lost or renamed, or with its text damaged."""
    if random_.random() < 0.1:
        return mutated_bytes(json.dumps(value).encode(), random_)
    changed = copy.deepcopy(value)
    holder, key = random_.choice(list(_places(changed)))
    match random_.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        case 2:
            other, at = random_.choice(list(_places(value)))
            holder[key] = other[at]
        case _:
            holder[key] = random_.choice(HOSTILE_VALUES)
    return json.dumps(changed).encode()


def parsed_or_none(data: bytes) -> Any:
    """The value of JSON text; None if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def mutated_bytes(data: bytes, random_: random.Random, end: int | None = None) -> bytes:
    """The bytes with a change among the first `end`; None: anywhere."""
    at = random_.randrange(end or len(data))
    match random_.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << random_.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + random_.randbytes(random_.choice((1, 4, 8))) + data[at + 8 :]
        case 2:
            return data[:at]
        case 3:
            return data[:at] + data[at + random_.choice((1, 4, 8)) :]
        case _:
            size = random_.choice((4, 8))
            number = random_.choice(HOSTILE_NUMBERS) % (1 << 8 * size)
            return data[:at] + number.to_bytes(size, "little") + data[at + size :]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key within a JSON value."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(each)


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Let this process have so much more address space; allocations beyond it raise MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def survivors(read: Callable[[], object], mutate: Callable[[random.Random], str], *, seeds: range, count: int) -> int:
    """How many of `count` changes a seed can be read all the same; the others raise ModelErrors that name the file.

    `mutate` writes a changed file and returns what an error must name. Reading may take MOST_BYTES.
    """
    with memory_limit(MOST_BYTES):
        return _survivors(read, mutate, product(seeds, range(count)))


def _survivors(
    read: Callable[[], object], mutate: Callable[[random.Random], str], mutations: Iterable[tuple[int, int]]
) -> int:
    loaded = 0
    for seed, number in mutations:
        named = mutate(random.Random(f"{seed} {number}"))
        try:
            read()
        except ModelError as error:
            if named not in str(error):
                raise AssertionError(f"mutation {number} of seed {seed}: {error}") from error
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed} raised {error!r:.200}") from error
        else:
            loaded += 1
    return loaded


def use_config(config: ModelConfig) -> None:
    """Ask of a model's shape what planning and building ask."""
    assert config.num_parameters > 0
    assert config.attention_scale > 0
    for rope in {*config.ropes, config.rope}:
        assert all(frequency >= 0 for frequency in rope.inverse_frequencies(max(config.rotary_widths)))
    assert len(config.windows) == config.num_layers
    assert config.weights.of_experts.within(64)
