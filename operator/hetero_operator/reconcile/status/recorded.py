"""Warnings that the cluster recorded about a pod: the cause, where the pod's own status has none.

Several exist at once, and their order changes by itself. So the choice goes by their content: the most specific, then
the first by alphabet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Final

from hetero_operator.reconcile.model import PodEvent
from hetero_operator.reconcile.names import MODEL_VOLUMES
from hetero_operator.reconcile.status.reasons import Reason, Trouble, broken
from hetero_operator.reconcile.status.text import steady

Warnings = Sequence[PodEvent]

_MOUNT_REASONS: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_SANDBOX_REASONS: Final = frozenset({"FailedCreatePodSandBox", "NetworkNotReady"})
_NAMED_VOLUME: Final = re.compile(r'\bvolume "([^"]+)"')
_UNMOUNTED: Final = re.compile(r"\bunmounted volumes=\[([^\]]*)\]")
_GENERIC: Final = "Unable to "
"""Begins the kubelet's summary of an earlier detailed message."""
_PULL_PREFIX: Final = re.compile(r'^(Failed to pull|Back-off pulling) image "[^"]*":? ?(ErrImagePull: ?)?')
_CREATION_PREFIX: Final = re.compile(r"^.*?(failed error|Error creating): ?")


def mount_trouble(warnings: Warnings) -> Trouble | None:
    """Return the trouble of a volume that cannot be mounted, None without one."""
    said = _said(warnings, lambda event: event.reason in _MOUNT_REASONS)
    if not said:
        return None
    is_model = not MODEL_VOLUMES.isdisjoint(_missing_volumes(said, warnings))
    return broken(Reason.MODEL_VOLUME_NOT_READY if is_model else Reason.VOLUME_NOT_READY, said)


def _missing_volumes(said: str, warnings: Warnings) -> Collection[str]:
    """Return the pod's volumes that a message names, by their names in the pod.

    The kubelet's summary lists them so. Its details name a claim's volume by the PersistentVolume instead.
    """
    named = set(_NAMED_VOLUME.findall(said))
    messages = [event.message for event in warnings if event.reason in _MOUNT_REASONS]
    unmounted = {name for text in messages for names in _UNMOUNTED.findall(text) for name in names.split()}
    return named & unmounted or unmounted or named


def sandbox_trouble(warnings: Warnings) -> Trouble | None:
    """Return the trouble of a sandbox that cannot be created, None without one."""
    said = _said(warnings, lambda event: event.reason in _SANDBOX_REASONS)
    return broken(Reason.SANDBOX_FAILED, said) if said else None


def scheduling_warning(warnings: Warnings) -> str:
    """Return the scheduler's last message, "" when there is none."""
    return _said(warnings, lambda event: event.reason == "FailedScheduling")


def creation_warning(warnings: Warnings) -> str:
    """Return why a StatefulSet or ReplicaSet could not create a pod."""
    said = _said(warnings, lambda event: event.reason == "FailedCreate")
    return _CREATION_PREFIX.sub("", said)


def pull_error(said: str, image: str, warnings: Warnings) -> str:
    """Return why an image cannot be pulled, "" when that is not known. `said` is the container's status.

    The status alternates between the error and "Back-off pulling image", which in newer versions contains the error
    too; all give the same here.
    """
    own = _PULL_PREFIX.sub("", steady(said))
    if own:
        return own
    prefix = f'Failed to pull image "{image}"'
    return _PULL_PREFIX.sub("", _said(warnings, lambda event: event.message.startswith(prefix)))


def failed_probe(warnings: Warnings) -> str:
    """Return which probe failed, "Liveness" or "Startup", "" when none did."""
    for kind in ("Liveness", "Startup"):
        if any(event.reason == "Unhealthy" and event.message.startswith(f"{kind} probe") for event in warnings):
            return kind
    return ""


def _said(warnings: Warnings, chosen: Callable[[PodEvent], bool]) -> str:
    messages = {steady(event.message) for event in warnings if chosen(event)} - {""}
    return min(messages, key=lambda text: (text.startswith(_GENERIC), text), default="")
