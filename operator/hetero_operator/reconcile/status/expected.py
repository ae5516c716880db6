"""Which pods hold which ranks: GPU pools have the low ranks, then CPU pools, each pod its share in order."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.contract import LABEL_ROLE, ROLE_RANK
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.model import Object, Observed
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.ownership import label_of


@dataclass(frozen=True, slots=True)
class ExpectedPod:
    """A rank pod that has to be there."""

    name: str
    pool: str
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def subject(self, node: str = "") -> str:
        """Its ranks, name and node, as messages begin."""
        last = self.first_rank + self.num_ranks - 1
        ranks = f"rank {self.first_rank}" if self.num_ranks == 1 else f"ranks {self.first_rank}-{last}"
        return f"{ranks} (pod {self.name}, node {node})" if node else f"{ranks} (pod {self.name})"


def expected_pods(names: Names, spec: HeteroInferenceSpec) -> tuple[ExpectedPod, ...]:
    """All rank pods in rank order."""
    pods: list[ExpectedPod] = []
    rank = 0
    for pool in spec.pools_in_rank_order:
        for ordinal in range(pool.pods):
            pods.append(ExpectedPod(f"{names.pool(pool.name)}-{ordinal}", pool.name, rank, pool.ranks_per_pod))
            rank += pool.ranks_per_pod
    return tuple(pods)


def rank_pods(observed: Observed) -> dict[str, Object]:
    """Pods of ranks that are there, by name."""
    return {pod["metadata"]["name"]: pod for pod in observed.pods if label_of(pod, LABEL_ROLE) == ROLE_RANK}
