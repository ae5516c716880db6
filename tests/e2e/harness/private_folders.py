"""Folders that kubelet, containerd and CNI write to whatever they are told, each node with its own.

Kubelets of one machine would delete one another's pod logs and sit on one another's sockets. So a node's programs share
a mount namespace in which these places are folders of the node. containerd is the first in it; all that is mounted
there, volumes too, goes with the last of its processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PLACES = (Path("/var/log"), Path("/var/lib/cni"), Path("/var/lib/kubelet"), Path("/run/containerd"))
_SCRIPT = 'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 1; shift 2; done; shift; exec "$@"'


def with_private_folders(command: Sequence[str], folder: Path) -> list[str]:
    """A command line that runs `command` with the places in `folder` instead, in a mount namespace of its own."""
    pairs = [str(path) for place in PLACES for path in (_replacement(place, folder), place)]
    return ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _SCRIPT, "sh", *pairs, "--", *command]


def make_folders(folder: Path, record: Path) -> None:
    """What is mounted, and where; `record` (the janitor's MADE) gets the names of places that had to be made."""
    for place in PLACES:
        _replacement(place, folder).mkdir(parents=True)
        if not place.exists():
            place.mkdir(parents=True)
            with record.open("a", encoding="utf-8") as made:
                made.write(f"{place}\n")


def _replacement(place: Path, folder: Path) -> Path:
    return folder / "private" / "-".join(place.parts[1:])
