"""Troubles and ends of one container, by its status and by Warnings about its pod.

A container that crashes cycles: running, terminated, waiting, running. Through the whole cycle its last end is
reported, so that the status stands still. That end is forgotten once the container is ready, is known to be one of the
group, or has run as long as the kubelet takes to forget it.

Warnings tell the cause where the pod's own status has none. Several exist at once, and their order changes by itself.
So the choice goes by their content: the most specific, then the first by alphabet.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT, EXIT_STUCK, EXIT_USAGE
from hetero_operator.reconcile.manifests.model_volumes import is_model_container, is_model_volume
from hetero_operator.reconcile.model import PodEvent
from hetero_operator.reconcile.status.reasons import Level, Reason, Trouble, absent, broken
from hetero_operator.reconcile.status.text import last_line, parsed_time, steady

_SIGNALLED: Final = 128
"""A container that signal n killed exits with 128 + n."""
KILLED: Final = frozenset({_SIGNALLED + signal.SIGKILL, _SIGNALLED + signal.SIGTERM})
"""Exit codes of a container that the kubelet stopped."""
_MEANINGS: Final[Mapping[int, str]] = {
    EXIT_OK: "it ended in peace, which nobody asked for",
    EXIT_FAILURE: "it broke while running",
    EXIT_USAGE: "its command line or its manifest is wrong",
    EXIT_PERMANENT: "trying again cannot help",
    EXIT_STUCK: "it could not leave an ended epoch in time",
    126: "its program cannot be executed",
    127: "its program was not found",
}
"""Meaning of the exit codes of our programs, and of shells."""
_START_ERRORS: Final = frozenset({"StartError", "ContainerCannotRun"})
RECOVERED_AFTER: Final = timedelta(minutes=10)
"""The kubelet's back-off starts afresh after this time of running."""
_PULL_REASONS: Final = frozenset(
    {
        "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
        "RegistryUnavailable", "SignatureValidationFailed",
    }
)  # fmt: skip
_CREATING: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_LOOP: Final = "CrashLoopBackOff"
Warnings = Sequence[PodEvent]
_MOUNT_REASONS: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_SANDBOX_REASONS: Final = frozenset({"FailedCreatePodSandBox", "NetworkNotReady"})
_NAMED_VOLUME: Final = re.compile(r'\bvolume "([^"]+)"')
_UNMOUNTED: Final = re.compile(r"\bunmounted volumes=\[([^\]]*)\]")
_GENERIC: Final = "Unable to "
"""Begins the kubelet's summary of an earlier detailed message."""
_PULL_PREFIX: Final = re.compile(r'^(Failed to pull|Back-off pulling) image "[^"]*":? ?(ErrImagePull: ?)?')
_CREATION_PREFIX: Final = re.compile(r"^.*?(failed error|Error creating): ?")


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a container."""

    exit_code: int
    reason: str
    last_line: str
    finished_at: str = ""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ending | None:
        """Return the end in a container's `state` or `lastState`, None when it holds none."""
        ended = state.get("terminated")
        if not ended:
            return None
        return cls(
            exit_code=int(ended.get("exitCode", 0)),
            reason=str(ended.get("reason") or ""),
            last_line=last_line(str(ended.get("message") or "")),
            finished_at=str(ended.get("finishedAt") or ""),
        )

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the kernel killed it for want of memory."""
        return self.reason == "OOMKilled"

    @property
    def is_start_error(self) -> bool:
        """Whether its program never ran."""
        return self.reason in _START_ERRORS

    def __str__(self) -> str:
        said = f": {self.last_line}" if self.last_line else ""
        return f"exited with code {self.exit_code} ({self._meaning()}){said}"

    def _meaning(self) -> str:
        if self.is_out_of_memory:
            return "the kernel killed it for want of memory"
        if self.exit_code in _MEANINGS:
            return _MEANINGS[self.exit_code]
        try:
            return f"killed by {signal.Signals(self.exit_code - _SIGNALLED).name}"
        except ValueError:
            return self.reason or "unknown"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts about a container's pod."""

    now: datetime
    warnings: Warnings = ()
    is_joined: bool = False
    """Whether the gateway talks to it."""


def main_trouble(status: Mapping[str, Any], around: Surroundings) -> Trouble | None:
    """Return why a container that has to run all the time is not ready, None when it is."""
    state = status.get("state") or {}
    ending = current_ending(status, around)
    if ending is not None:
        return _exit_trouble(status, ending, around.warnings)
    if "running" in state:
        return None if status.get("ready") else Trouble(Level.UNREADY, Reason.RANK_NOT_READY, "is not ready")
    return _waiting_trouble(status, around)


def init_trouble(status: Mapping[str, Any], around: Surroundings) -> Trouble | None:
    """Return why a container that has to end before others start has not, None when it has."""
    state = status.get("state") or {}
    is_model = is_model_container(str(status.get("name")))
    ended = Ending.from_state(state)
    if ended is not None and ended.exit_code == 0:
        return None
    ending = current_ending(status, around)
    if ending is not None:
        reason = Reason.MODEL_DOWNLOAD_FAILED if is_model else Reason.INIT_CONTAINER_FAILED
        return broken(reason, f"init container {status.get('name')} {ending}")
    if "running" in state:
        if status.get("started") and status.get("ready"):
            return None  # a sidecar
        words = "fetches the model" if is_model else f"runs init container {status.get('name')}"
        return absent(Reason.FETCHING_MODEL if is_model else Reason.STARTING, words)
    return _waiting_trouble(status, around)


def current_ending(status: Mapping[str, Any], around: Surroundings) -> Ending | None:
    """Return the end that a container has not recovered from, None when there is none."""
    state, last = status.get("state") or {}, status.get("lastState") or {}
    ending = Ending.from_state(state) or Ending.from_state(last)
    running = state.get("running")
    if ending is None or running is None:
        return ending
    started = parsed_time(running.get("startedAt"))
    recovered = started is not None and around.now - started >= RECOVERED_AFTER
    return None if recovered or around.is_joined or status.get("ready") else ending


def _exit_trouble(status: Mapping[str, Any], ending: Ending, warnings: Warnings) -> Trouble:
    if ending.is_out_of_memory:
        return broken(Reason.RANK_OUT_OF_MEMORY, str(ending))
    if ending.is_start_error:
        return broken(Reason.CONTAINER_START_FAILED, f"cannot be started: {ending.last_line or ending.reason}")
    probe = failed_probe(warnings) if ending.exit_code in KILLED else ""
    if probe == "Liveness":
        return broken(Reason.RANK_HUNG, "was stopped because its liveness probe failed")
    if probe == "Startup":
        limit = "spec.recovery.startupTimeoutSeconds"
        return broken(Reason.STARTUP_TIMEOUT, f"was stopped because it was not up in time ({limit})")
    looping = _endings(status) > 1
    return broken(Reason.RANK_CRASH_LOOP if looping else Reason.RANK_EXITED, str(ending))


def _endings(status: Mapping[str, Any]) -> int:
    """Return how often it ended: a running container has been restarted after each end."""
    is_running = "running" in (status.get("state") or {})
    return int(status.get("restartCount", 0)) + (not is_running)


def _waiting_trouble(status: Mapping[str, Any], around: Surroundings) -> Trouble:
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in _PULL_REASONS:
        return _pull_trouble(str(status.get("image") or ""), reason, said, around.warnings)
    if reason == _LOOP:
        return broken(Reason.RANK_CRASH_LOOP, "ends again and again", is_vague=True)
    if reason not in _CREATING:
        return broken(Reason.CONTAINER_START_FAILED, f"{reason}: {steady(said)}" if said else reason)
    found = mount_trouble(around.warnings) or sandbox_trouble(around.warnings)
    return found or absent(Reason.STARTING, "its containers are being created")


def _pull_trouble(image: str, reason: str, said: str, warnings: Warnings) -> Trouble:
    error = pull_error(said, image, warnings)
    words = f'image "{image}" cannot be pulled'
    if error:
        return broken(Reason.IMAGE_PULL, f"{words}: {error}")
    return broken(Reason.IMAGE_PULL, words, is_vague=reason in ("ImagePullBackOff", "ErrImagePull"))


def mount_trouble(warnings: Warnings) -> Trouble | None:
    """Return the trouble of a volume that cannot be mounted, None without one."""
    said = _said(warnings, lambda event: event.reason in _MOUNT_REASONS)
    if not said:
        return None
    is_model = any(map(is_model_volume, _missing_volumes(said, warnings)))
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
