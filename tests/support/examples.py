"""How many examples a property whose single example takes long is tried with."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

_BY_DEFAULT: Final = settings.get_profile("default").max_examples


def examples(count: int) -> int:
    """`count` in the default profile; in others as much more or less as they try elsewhere."""
    chosen = settings.default
    assert chosen is not None
    return max(1, count * chosen.max_examples // _BY_DEFAULT)
