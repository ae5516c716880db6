"""Who may own what, for each way to use the ranks: what a search within layers is given, one after another.

A set of roles fixes what does not come in units: who holds heads, who may help, who may have vocabulary rows. What
exchanges cost follows from that alone. Of ranks that are alike the first ones are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from hetero_api.spec_pools import PoolType
from hetero_placement.hardware import Hardware
from hetero_placement.tensor_search import FixedCounts, Roles

_FEW: Final = 4
"""Up to so many alike ranks every number of them is tried; beyond, powers of two and all."""


class RoleChoices:
    """Roles worth a try in one group. `every_rank`: each rank must have a part of every layer."""

    def __init__(self, hardware: Hardware, *, num_kv_heads: int, every_rank: bool) -> None:
        self._hardware = hardware
        self._num_kv_heads = num_kv_heads
        self._every_rank = every_rank
        self._gpus, self._cpus = hardware.ranks_of(PoolType.GPU), hardware.ranks_of(PoolType.CPU)
        self._all = tuple(range(len(hardware.ranks)))

    def gpu_only(self) -> Iterator[Roles]:
        """GPU ranks without heads, if there are more ranks than heads, may help."""
        for holders in self._choices(self._gpus):
            for vocabulary, helpers in self._with_and_without(holders, self._gpus):
                yield Roles(holders, helpers, vocabulary)

    def mlp_only(self) -> Iterator[Roles]:
        """At least one CPU rank has something to do; all, if the resource asks for Tensor."""
        for holders in self._choices(self._gpus):
            helpers = _without(self._all, holders)
            for vocabulary, busy in product(self._vocabularies(holders, self._gpus), self._busy(helpers)):
                yield Roles(holders, helpers, vocabulary, busy)

    def all_parts(self) -> Iterator[Roles]:
        """At least one CPU rank has heads or vocabulary rows."""
        for on_gpu in self._choices(self._gpus):
            for on_cpu in ((), *self._choices(self._cpus)):
                holders = on_gpu + on_cpu
                if len(holders) > self._num_kv_heads:
                    continue
                for vocabulary, helpers in self._with_and_without(holders, self._all):
                    busy = frozenset(helpers) if self._every_rank else frozenset[int]()
                    for first in self._first_rows(on_cpu, vocabulary):
                        yield Roles(holders, helpers, vocabulary, busy, first)

    def every_cpu_rank(self) -> Iterator[Roles]:
        """CPU ranks alone, each with a part of every layer."""
        for holders in self._choices(self._cpus):
            helpers = _without(self._cpus, holders)
            for vocabulary in self._vocabularies(holders, self._cpus):
                yield Roles(holders, helpers, vocabulary, busy=frozenset(helpers))

    def cpu_ranks_within(self, ranks: tuple[int, ...]) -> Iterator[Roles]:
        """Yield roles of CPU ranks alone, with layers on `ranks` at most."""
        for holders in self._choices(ranks):
            others = _without(self._cpus, holders)
            for vocabulary in self._vocabularies(holders, self._cpus):
                for helpers in dict.fromkeys(((), tuple(rank for rank in others if rank in ranks))):
                    yield Roles(holders, helpers, vocabulary)

    def by_shares(self, fixed: FixedCounts) -> Iterator[Roles]:
        """Holders as the shares say, or any; the others may help."""
        if fixed.heads is not None:
            choices: Iterator[tuple[int, ...]] = iter([tuple(rank for rank in self._all if fixed.heads[rank])])
        else:
            choices = self._choices(self._all)
        for holders in choices:
            others = _without(self._all, holders)
            # Shares of the MLP say themselves who has nothing; where they are open, nobody is to be left out.
            busy = frozenset(others) if fixed.columns is None else frozenset[int]()
            for vocabulary in self._vocabularies(holders, self._all):
                yield Roles(holders, others, vocabulary, busy)
                if others and not busy:
                    yield Roles(holders, (), vocabulary)

    def classes(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Those of `ranks` that are alike, together."""
        classes = (tuple(rank for rank in alike if rank in ranks) for alike in self._hardware.classes())
        return [alike for alike in classes if alike]

    def _first_rows(self, on_cpu: tuple[int, ...], vocabulary: tuple[int, ...]) -> Iterator[frozenset[int]]:
        """CPU ranks that must have rows, so that some part beside the MLP is on one."""
        if on_cpu:
            yield frozenset()
            return
        for alike in self.classes([rank for rank in self._cpus if rank in vocabulary]):
            yield frozenset(alike[:1])

    def _busy(self, helpers: tuple[int, ...]) -> list[frozenset[int]]:
        """Who of the helpers must get something."""
        if self._every_rank:
            return [frozenset(helpers)]
        return [frozenset(alike[:1]) for alike in self.classes(self._cpus)]

    def _with_and_without(
        self, holders: tuple[int, ...], ranks: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Who may have rows, and who helps: all others of `ranks`, or, if that may be, nobody."""
        others = _without(ranks, holders)
        helping = [others] if self._every_rank else list(dict.fromkeys(((), others)))
        yield from product(self._vocabularies(holders, ranks), helping)

    def _vocabularies(self, holders: tuple[int, ...], ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Who may have rows, of `ranks`: what rows on others than the holders cost depends on their kind only."""
        kinds = [(), self._gpus, self._cpus, self._all]
        sets = (tuple(rank for rank in ranks if rank in holders or rank in kind) for kind in kinds)
        return list(dict.fromkeys(sets))

    def _choices(self, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield sets of ranks, at least one each; of ranks that are alike the first ones."""
        classes = self.classes(ranks)
        for numbers in product(*(_numbers_up_to(len(alike)) for alike in classes)):
            chosen = sorted(rank for alike, number in zip(classes, numbers, strict=True) for rank in alike[:number])
            if chosen and len(chosen) <= self._num_kv_heads:
                yield tuple(chosen)


def _without(ranks: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank not in others)


def _numbers_up_to(most: int) -> list[int]:
    """0, and how many of `most` ranks are worth a try."""
    if most <= _FEW:
        return list(range(most + 1))
    return [0, *(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]
