"""The load that a placement is chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_api.spec import WorkloadSpec


@dataclass(frozen=True, slots=True)
class Workload:
    """`concurrency` prompts that come at once; then all of their outputs are decoded together."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrency: int = 1

    @classmethod
    def from_spec(cls, spec: WorkloadSpec) -> Workload:
        return cls(spec.prompt_tokens, spec.output_tokens, spec.concurrency)

    @property
    def decode_context(self) -> int:
        """Tokens that a row attends to, in the middle of the output."""
        return self.prompt_tokens + self.output_tokens // 2
