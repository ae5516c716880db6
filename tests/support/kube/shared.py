"""One control plane for all test processes of a run.

An API server takes 350 MB and five seconds of a core to start, so pytest-xdist's workers share one: the first that
needs it starts it, the last to leave ends it (by way of the keeper). A test that stops the API server, or that looks at
all namespaces, starts a control plane of its own instead.
"""

from __future__ import annotations

import fcntl
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.support.kube.binaries import Binaries
from tests.support.kube.cluster import Cluster
from tests.support.kube.control_plane import ControlPlane, Options, hold
from tests.support.kube.errors import ComponentFailed
from tests.support.kube.keeper import RECORD


@contextmanager
def shared_control_plane(root: Path, name: str, binaries: Binaries, options: Options) -> Iterator[Cluster]:
    """The run's control plane `name`, below `root`, a folder that the run's processes have in common."""
    with _alone(root / f"{name}.lock"):
        folder, users = _join(root, name)
        plane = None if users else ControlPlane(folder, binaries, options)
        if plane is not None:
            plane.start()
    try:
        yield Cluster.load(folder)
    finally:
        if plane is not None:
            plane.release()
        if users is not None:
            users.close()


def _join(root: Path, name: str) -> tuple[Path, IO[str] | None]:
    """The folder of the control plane that runs, and our hold on it; or a fresh folder and nothing."""
    for attempt in itertools.count():
        folder = root / f"{name}-{attempt}"
        if not folder.exists():
            break
        try:
            users = hold(folder)
        except ComponentFailed:  # its last user has just left
            continue
        if (folder / RECORD).exists():
            break
        users.close()  # it ended before, or never started
    return folder, users if folder.exists() else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
