"""Rank pods as StatefulSets make them, and the containers in them.

Each pool is a set of its own, whose pods have one container. Where all ranks are in one pod (`topology.colocate`) there
is one set with one pod, and what else would be a pod of a pool is a container of it. Containers of a pod have one
address, so each has a port of its own for probes and metrics. Either way a rank has the same place in its group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hetero_api.contract import POD_HEALTH_PORT
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_pools import PoolSpec
from hetero_operator.reconcile.names import RANK_CONTAINER, RANK_PORT

ONE_POD: Final = "ranks"
"""Name of the set whose pod holds the ranks of all pools."""


@dataclass(frozen=True, slots=True)
class RankContainer:
    """Container that supervises `ranksPerPod` ranks of a pool."""

    pool: PoolSpec
    name: str = RANK_CONTAINER
    ordinal: int | None = None
    """Its number among those of the pool; None: that of its pod."""
    index: int = 0
    """Its number in the pod."""

    @property
    def port_name(self) -> str:
        """Name of the port for probes and metrics."""
        return self.numbered(RANK_PORT)

    @property
    def port(self) -> int:
        """Number of that port."""
        return POD_HEALTH_PORT + self.index

    def numbered(self, name: str) -> str:
        """Return a name that no other container of the pod makes from it."""
        return f"{name}-{self.index}" if self.index else name


@dataclass(frozen=True, slots=True)
class RankSet:
    """Equal rank pods, which one StatefulSet makes."""

    name: str
    """The pool's, or ONE_POD: ends the StatefulSet's name, and is its pods' LABEL_POOL."""
    pods: int
    containers: tuple[RankContainer, ...]
    """Containers of each pod, in rank order."""


def rank_sets(spec: HeteroInferenceSpec) -> tuple[RankSet, ...]:
    """Return all sets of rank pods."""
    if spec.is_one_pod:
        return (RankSet(ONE_POD, 1, tuple(_containers_of_one_pod(spec))),)
    return tuple(RankSet(pool.name, pool.pods, (RankContainer(pool),)) for pool in spec.pools)


def num_rank_pods(spec: HeteroInferenceSpec) -> int:
    """Return the number of rank pods over all sets."""
    return sum(item.pods for item in rank_sets(spec))


def health_ports(spec: HeteroInferenceSpec) -> dict[str, int]:
    """Return the ports for probes and metrics of all containers of a rank pod, by name."""
    return {item.port_name: item.port for ranks in rank_sets(spec) for item in ranks.containers}


def one_pod_container(first_rank: int) -> str:
    """Return the name of a container of the one pod."""
    return f"{RANK_CONTAINER}-{first_rank}"


def is_rank_container(name: str) -> bool:
    """Return whether a container of a rank pod is for ranks: others were injected by somebody else."""
    prefix, _, rank = name.rpartition("-")
    return name == RANK_CONTAINER or (prefix == RANK_CONTAINER and rank.isdigit())


def _containers_of_one_pod(spec: HeteroInferenceSpec) -> Iterator[RankContainer]:
    places = [(pool, ordinal) for pool in spec.pools_in_rank_order for ordinal in range(pool.pods)]
    first_rank = 0
    for index, (pool, ordinal) in enumerate(places):
        yield RankContainer(pool, one_pod_container(first_rank), ordinal, index)
        first_rank += pool.ranks_per_pod
