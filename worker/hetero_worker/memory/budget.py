"""Budget of the KV cache: the part of a rank's memory that is left for it.

It is the memory given - runtime - weights - workspace of the largest step - graphs, and at most what the device has
left after the load beside workspace and graphs. `hetero_api.rank_memory` bounds each of these from shapes, well enough
to refuse a model before it is read; `runners.profile_run` measures the workspace. Nothing here allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.rank_memory import RUNTIME_BYTES, SNAPSHOT_PART, KvCost
from hetero_worker.errors import MemoryBudgetError


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One rank's memory, in bytes."""

    memory_bytes: int
    weight_bytes: int
    workspace_bytes: int
    runtime_bytes: int = RUNTIME_BYTES
    state_bytes: int = 0
    """States of all sequences that may run, in layers of the gated delta rule."""
    snapshot_bytes: int = 0
    """One snapshot of a sequence's states."""
    graph_bytes: int = 0
    """Reserve for graphs of steps, which are recorded after the cache is allocated."""
    adapter_bytes: int = 0
    """Reserve for adapters, which come while the rank serves."""
    draft_bytes: int = 0
    """Workspace of steps of a draft model or prediction head; its weights are among `weight_bytes`."""
    available_bytes: int | None = None
    """Free memory of the device after the load; None: unknown, or not loaded yet."""
    remedy: str = "give the rank more memory (memoryPerRank)"
    """Advice to the user how to give this rank more memory."""

    @property
    def left_bytes(self) -> int:
        """Memory left for the KV cache and its scratch."""
        left = self._left_of_given
        return left if self.available_bytes is None else min(left, self.available_bytes - self._kept)

    @property
    def snapshot_budget_bytes(self) -> int:
        """Memory for snapshots of sequences' states; 0 for a rank that keeps none."""
        return max(0, self.left_bytes) // SNAPSHOT_PART if self.snapshot_bytes else 0

    def kv_budget_bytes(self, cost: KvCost) -> int:
        """Return the most bytes that the KV cache may take; 0 for a rank without heads.

        Raises MemoryBudgetError, with the sum, if nothing is left.
        """
        left = self.left_bytes
        if left <= 0:
            raise MemoryBudgetError(
                f"no memory is left for the KV cache: {self}; {self.remedy}, give it a smaller share, or lower "
                f"maxNumBatchedTokens or maxModelLen{', or maxNumSeqs' if self.state_bytes else ''}"
                f"{', or set enforceEager' if self.graph_bytes else ''}"
                f"{', or lower adapters.maxLoaded or adapters.maxRank' if self.adapter_bytes else ''}"
                f"{', or take a smaller speculative.draft, or speculative.kind NGram' if self.draft_bytes else ''}"
            )
        return cost.cache_of(left - self.snapshot_budget_bytes)

    def __str__(self) -> str:
        kept = f"{mib(self.workspace_bytes)} workspace"
        if self.state_bytes:
            kept += f" - {mib(self.state_bytes)} states of sequences"
        if self.graph_bytes:
            kept += f" - {mib(self.graph_bytes)} graphs"
        if self.adapter_bytes:
            kept += f" - {mib(self.adapter_bytes)} adapters"
        if self.draft_bytes:
            kept += f" - {mib(self.draft_bytes)} steps of the draft model"
        text = (
            f"{mib(self.memory_bytes)} given - {mib(self.runtime_bytes)} runtime - {mib(self.weight_bytes)} weights "
            f"- {kept} = {mib(self._left_of_given)}"
        )
        if self.left_bytes == self._left_of_given or self.available_bytes is None:
            return text
        return f"{text}, but the device has {mib(self.available_bytes)} available - {kept} = {mib(self.left_bytes)}"

    @property
    def _kept(self) -> int:
        """Memory that must stay free after the load."""
        return self.workspace_bytes + self.state_bytes + self.graph_bytes + self.adapter_bytes + self.draft_bytes

    @property
    def _left_of_given(self) -> int:
        return self.memory_bytes - self.runtime_bytes - self.weight_bytes - self._kept


def mib(size_bytes: int) -> str:
    """Return the size as text in MiB."""
    return f"{size_bytes / 1024**2:,.0f} MiB"
