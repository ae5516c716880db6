"""A kubelet for a whole namespace in the background: every pod is bound, runs and becomes ready, and ends when deleted.

Pods that a test wants in another state it holds by name: the autopilot leaves them alone.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from tests.support.kube.client import Client, Object
from tests.support.kube.errors import ApiError
from tests.support.kube.kubelet import Kubelet

PERIOD_S = 0.1


class Autopilot:
    """Works while entered."""

    def __init__(self, client: Client, namespace: str, *, node: str = "node") -> None:
        self._client = client
        self._namespace = namespace
        self._node = node
        self._kubelet = Kubelet(client, namespace)
        self._held: frozenset[str] = frozenset()
        self._running: set[str] = set()
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._fly, name="autopilot", daemon=True)

    def hold(self, *pods: str) -> None:
        """Leave these pods alone from now on; returns when no write to them is under way."""
        with self._turn:
            self._held |= set(pods)

    def release(self, *pods: str) -> None:
        """Run these pods again."""
        with self._turn:
            self._held -= set(pods)
            self._running.clear()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _fly(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                pods = self._client.list_all("Pod", self._namespace)
            except ApiError:
                continue
            for pod in pods:
                with self._turn:
                    self._serve(pod)

    def _serve(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if name in self._held:
            return
        try:
            if pod["metadata"].get("deletionTimestamp"):
                self._client.delete("Pod", name, self._namespace, grace_s=0)
            elif uid not in self._running:
                self._kubelet.run(name, node=pod["spec"].get("nodeName", self._node))
                self._running.add(uid)
        except ApiError:  # it changed or went away meanwhile: the next round sees it as it is
            return

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
