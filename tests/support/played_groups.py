"""Kubelets, ranks and gateways of all groups in a namespace, in the background: every group serves once its pods run.

A gateway serves when the rank pods of its replica and its revision run. Ranks of an image that is named BROKEN crash.
A gateway that is told to end does so at once, and a group that lost its gateway or a rank serves no more.
"""

from __future__ import annotations

import base64
from contextlib import ExitStack
from types import TracebackType
from typing import Final

from hetero_api.contract import (
    LABEL_NAME,
    LABEL_POOL,
    LABEL_REPLICA,
    LABEL_REVISION,
    LABEL_ROLE,
    ROLE_GATEWAY,
    SECRET_ADMIN_TOKEN_KEY,
)
from hetero_api.v1 import admin_pb2
from tests.support import pod_statuses
from tests.support.entered_thread import EnteredThread
from tests.support.kube.client import Client, Object
from tests.support.kube.errors import ApiError
from tests.support.kube.kubelet import Kubelet, now
from tests.support.played_gateway import PlayedGateway, rank_status

BROKEN: Final = "example.com/broken:1"
PERIOD_S: Final = 0.1
GroupKey = tuple[str, str, str]
"""Resource, replica and revision of ranks."""


class PlayedGroups(EnteredThread):
    """Works while entered; for resources of one pool of `ranks` pods."""

    def __init__(self, client: Client, namespace: str, *, ranks: int = 2) -> None:
        super().__init__()
        self._client = client
        self._namespace = namespace
        self._num_ranks = ranks
        self._kubelet = Kubelet(client, namespace)
        self._ran: set[str] = set()
        self._gateways: dict[str, PlayedGateway] = {}
        self._ready: set[str] = set()
        self._stack = ExitStack()
        self.serving: frozenset[str] = frozenset()
        """Gateway pods that serve now."""
        self.least_serving: int = 0
        """Fewest that served at a time since it was set."""

    def watch(self) -> None:
        """Count anew what serves."""
        self.least_serving = len(self.serving)

    def _work(self) -> None:
        while not self._leaving.wait(PERIOD_S):
            try:
                pods = self._client.list_all("Pod", self._namespace, labels=LABEL_NAME)
                self._take_turn(pods)
            except ApiError:  # something changed or went away meanwhile: the next round sees it as it is
                continue

    def _take_turn(self, pods: list[Object]) -> None:
        groups: dict[GroupKey, list[Object]] = {}
        alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        for pod in alive:
            groups.setdefault(_group_of(pod), []).append(pod)
        serving = [self._run_group(members) for members in groups.values()]
        self.serving = frozenset(name for name in serving if name)
        self.least_serving = min(self.least_serving, len(self.serving))
        for pod in pods:
            if pod["metadata"].get("deletionTimestamp"):
                self._client.delete("Pod", pod["metadata"]["name"], self._namespace, grace_s=0)

    def _run_group(self, members: list[Object]) -> str:
        """Run a group's pods; return its gateway's name if it serves."""
        ranks = [pod for pod in members if pod["metadata"]["labels"][LABEL_ROLE] != ROLE_GATEWAY]
        works = [pod for pod in ranks if self._run_rank(pod)]
        serving = ""
        for gateway in members:
            if gateway not in ranks and self._run_gateway(gateway, works):
                serving = str(gateway["metadata"]["name"])
        return serving

    def _run_rank(self, pod: Object) -> bool:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        works = bool(pod["spec"]["containers"][0]["image"] != BROKEN)
        if uid not in self._ran:
            if works:
                self._kubelet.run(name)
            else:
                self._kubelet.crash_loop(name, exit_code=3, message="no such model")
            self._ran.add(uid)
        return works

    def _run_gateway(self, pod: Object, ranks: list[Object]) -> bool:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        serves = len(ranks) == self._num_ranks
        gateway = self._gateways.get(uid) or self._start_gateway(pod)
        names = sorted(str(rank["metadata"]["name"]) for rank in ranks)
        pool = ranks[0]["metadata"]["labels"][LABEL_POOL] if ranks else ""
        statuses = [rank_status(number, pool, rank) for number, rank in enumerate(names)]
        gateway.say(admin_pb2.GROUP_STATE_READY if serves else admin_pb2.GROUP_STATE_NEW, statuses)
        if uid not in self._ran or serves != (uid in self._ready):
            self._kubelet.bind(name)
            status = pod_statuses.running("gateway", ready=serves, at=now())
            status |= {"podIP": gateway.address, "podIPs": [{"ip": gateway.address}]}
            self._client.patch_status("Pod", name, status, self._namespace)
            self._ran.add(uid)
            (self._ready.add if serves else self._ready.discard)(uid)
        return serves

    def _start_gateway(self, pod: Object) -> PlayedGateway:
        labels = pod["metadata"]["labels"]
        ordinal = labels.get(LABEL_REPLICA)
        group = labels[LABEL_NAME] + (f"-{ordinal}" if ordinal else "")
        secret = self._client.get("Secret", f"{group}-group-{labels[LABEL_REVISION]}", self._namespace)
        token = base64.b64decode(secret["data"][SECRET_ADMIN_TOKEN_KEY]).decode()
        gateway = self._stack.enter_context(PlayedGateway(token))
        self._gateways[pod["metadata"]["uid"]] = gateway
        return gateway

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()


def _group_of(pod: Object) -> GroupKey:
    labels = pod["metadata"]["labels"]
    return labels[LABEL_NAME], labels.get(LABEL_REPLICA, ""), labels[LABEL_REVISION]
