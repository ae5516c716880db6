"""The device groups and device links of an epoch: one of all GPU ranks, and what a plan needs beside it.

Members alone make them, in one order: that of the routes, which is the same on every rank. They are kept for later
plans. A rank on host cores has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from hetero_worker.distributed.control import Control
from hetero_worker.distributed.device_group import DeviceGroup, DeviceLink, TorchDeviceGroup
from hetero_worker.distributed.group_request import GroupRequest
from hetero_worker.distributed.routes import Link, Ranks, Routes
from hetero_worker.distributed.store import PrefixStore
from hetero_worker.errors import ExchangeError

CONNECTING_SIZES: Final = (1, 4 * 1024**2)
"""Elements of float32: what a step that decodes sums, and what a large prefill does."""


class DeviceGroups:
    """One rank's."""

    def __init__(self, request: GroupRequest) -> None:
        self._request = request
        self._store: PrefixStore | None = None
        self._control: Control | None = None
        self._groups: dict[Ranks, TorchDeviceGroup] = {}
        self._link_groups: dict[Link, TorchDeviceGroup] = {}
        self._links: dict[Link, DeviceLink] = {}

    def form(self, store: PrefixStore, control: Control) -> None:
        """Make the group of all GPU ranks, if these are several. Collective over all ranks. Raises ExchangeError."""
        if not self._request.num_gpu_ranks:
            return
        control.agree(self._lack(), "make device groups")
        self._store, self._control = store, control
        gpus = tuple(range(self._request.num_gpu_ranks))
        self.make(Routes((gpus,)) if len(gpus) > 1 else Routes())

    def make(self, routes: Routes) -> None:
        """Make what of these is missing. Collective over all ranks. Raises ExchangeError, on every rank."""
        if self._control is None:
            return
        self._control.meet()
        problem: ExchangeError | None = None
        try:
            self._make_own(routes)
        except ExchangeError as error:
            problem = error
        self._control.agree(problem, "make the device groups")

    def _lack(self) -> ExchangeError | None:
        """What this rank has not that it takes."""
        if self._request.device_backend is not None or not self._request.is_gpu_rank:
            return None
        return ExchangeError(
            f"rank {self._request.rank} is one of {self._request.num_gpu_ranks} GPU ranks, and its platform names no "
            "backend for collectives among them"
        )

    def _make_own(self, routes: Routes) -> None:
        rank = self._request.rank
        for ranks in routes.subgroups:
            if rank in ranks and ranks not in self._groups:
                self._groups[ranks] = self._make(ranks, "sums")
        for link in routes.links:
            if rank in link.ranks and link not in self._link_groups:
                self._link_groups[link] = self._make(link.ranks, f"link-{link.number}-{link.source}")
                self._links[link] = DeviceLink(self._link_groups[link], link)

    @property
    def everyone(self) -> TorchDeviceGroup | None:
        """The group of all GPU ranks, if this is one of several."""
        return self._groups.get(tuple(range(self._request.num_gpu_ranks)))

    @property
    def groups(self) -> Mapping[Ranks, TorchDeviceGroup]:
        return self._groups

    @property
    def links(self) -> Mapping[Link, DeviceLink]:
        return self._links

    @property
    def table(self) -> str:
        """For the log."""
        groups = [f"device rounds {list(ranks)}" for ranks in self._groups]
        links = [f"device link {link.source}->{list(link.receivers)}" for link in self._links]
        return ", ".join([*groups, *links]) or "no device groups"

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self._request.device.type == "cuda":
            torch.cuda.synchronize(self._request.device)

    def abort(self) -> None:
        for group in (*self._groups.values(), *self._link_groups.values()):
            group.abort()

    def stop(self) -> None:
        """What is called from now on raises; nothing is freed yet."""
        for group in (*self._groups.values(), *self._link_groups.values()):
            group.waits.abort()

    def close(self) -> None:
        """Free all. May block as long as work that was left behind."""
        for group in (*self._link_groups.values(), *self._groups.values()):
            group.close()
        self._groups, self._link_groups, self._links, self._store = {}, {}, {}, None

    def _make(self, ranks: Ranks, purpose: str) -> TorchDeviceGroup:
        backend, store = self._request.device_backend, self._store
        assert backend is not None, "form has looked"
        assert store is not None, "form has been called"
        group = TorchDeviceGroup.make(
            backend,
            ranks,
            rank=self._request.rank,
            store=PrefixStore(purpose, store),
            timeout_s=self._request.timeout_s,
            device=self._request.device,
        )
        if self._request.device.type == "cuda":
            connect(group, self._request.device)
        return group


def connect(group: DeviceGroup, device: torch.device) -> None:
    """Have the group take its memory now, before a rank looks what is left for its KV cache.

    NCCL connects ranks, and allocates for it, at the first use of an algorithm, which depends on the size.
    """
    for num_elements in CONNECTING_SIZES:
        group.all_reduce(torch.zeros(num_elements, device=device))
