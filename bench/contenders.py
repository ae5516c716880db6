"""Who is measured: ours in a layout (bench/ours.py), and peers (bench/peers/process.py).

All get the same token ids and generate greedily past end tokens. All stay loaded, idle or held still while another is
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from bench.workloads import Workload

SHORT_PROMPT: Final = (504, 3575, 282, 4649)
"""What the first token is generated of."""
HEADS: Final = 2
HEAD_TOKENS: Final = 12


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a workload. `first_token_s` is of the slowest prompt."""

    elapsed_s: float
    first_token_s: float
    output_tokens: int
    heads: tuple[tuple[int, ...], ...] = ()
    """The first tokens of the first completions."""


class Contender(Protocol):
    """Something that generates."""

    name: str

    def start(self) -> float:
        """Start it and generate one token of a short prompt; seconds from process start to that token."""
        ...

    @property
    def pid(self) -> int:
        """Of the process that all its others descend from."""
        ...

    def facts(self) -> Mapping[str, str]:
        """`arithmetic`, versions, and what else decides its speed."""
        ...

    def run(self, workload: Workload) -> Measured: ...

    def hold(self) -> None:
        """See to it that it takes no CPU until it is released."""
        ...

    def release(self) -> None: ...

    def peak_bytes(self) -> int: ...

    def allowed_bytes(self) -> int:
        """The peak that is aimed at; 0: none."""
        ...

    def stop(self) -> None: ...
