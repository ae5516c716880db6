"""Files of a local group: those of a run, and measurements that are kept for the next one.

`$HETERO_HOME/run/NAME`:

lock           held by the launcher while it runs; tells whether the group runs
manifest.yaml  manifest that the group was started with, whatever becomes of the user's file
group.json     GroupRecord: pids and addresses, for `hetero ps` and for commands without --address
gateway.json   written by the first gateway once it listens
token          secret that ranks authenticate with, mode 0600
admin-token    secret that callers of Admin show, mode 0600; only where callers need keys
*.log          one for each process; kept until the next start
*.measured     measurements of each rank at start, for the process that takes its place

`$HETERO_HOME/measured/NAME-KEY` keeps the measurements. A group that is started again with the same manifest, model and
cores need not measure the machine again: its ranks find the files in the run's directory, like a lost rank's successor,
and check that they were made under the same circumstances (`hetero_worker.process.tuning_cache`). This module makes
sure that they are of the same group and all its ranks, not older than a day, and taken while nobody else used the
ranks' cores, because a machine is not busy for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from hetero_api.cpu_list import parse_cpu_list
from hetero_api.host.file_lock import FileLock, is_held
from hetero_api.spec import HeteroInference
from hetero_client.errors import NoGroupError
from hetero_client.home import HeteroHome, read_json_object, write_atomically
from hetero_client.launcher.local_plan import GroupShare, LocalPlan


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A running local group. Addresses are "host:port"; `started_at` is seconds since 1970."""

    name: str
    pid: int
    manifest: str
    model_dir: str
    phase: str
    inference: str
    admin: str
    http: str
    started_at: float
    processes: dict[str, int]
    router: str = ""
    """Empty without a router's door."""
    cores: str = ""
    """List of the CPUs that its ranks are bound to."""
    memory_bytes: int = 0
    """Host memory of its ranks."""

    @property
    def share(self) -> GroupShare:
        """Its part of the machine."""
        return GroupShare(self.name, parse_cpu_list(self.cores), self.memory_bytes)


class RunDirectory:
    """Folder of one group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = FileLock(path / "lock")
        self.token_path = path / "token"
        """File with the ranks' secret."""
        self.admin_token_path = path / "admin-token"
        """File with the secret that callers of Admin show."""
        self.manifest_path = path / "manifest.yaml"
        """File with the manifest that the gateway reads, at each of its starts."""
        self.gateway_state_path = path / "gateway.json"
        """File that the gateway writes once it listens."""
        self.record_path = path / "group.json"
        """File with the group's record."""

    @classmethod
    def for_group(cls, home: HeteroHome, name: str) -> RunDirectory:
        """Return the folder of the group of that name."""
        return cls(home.runs / name)

    def log_path(self, process: str) -> Path:
        """Return the log of a process."""
        return self.path / f"{process}.log"

    def measurements_path(self, rank: str) -> Path:
        """Return the file with a rank's measurements."""
        return self.path / f"{rank}.measured"

    def prepare(self, resource: HeteroInference, *, with_admin_token: bool = False) -> None:
        """Remove an earlier run's files, write the manifest and new tokens. The lock must be held."""
        self.path.chmod(0o700)
        self.clear()
        for stale in self.path.glob("*.log"):
            stale.unlink(missing_ok=True)
        manifest = resource.model_dump_json(by_alias=True, exclude_none=True, indent=2)  # JSON is YAML
        self.manifest_path.write_text(manifest + "\n", encoding="utf-8")
        for path in (self.token_path, *([self.admin_token_path] if with_admin_token else [])):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))

    def clear(self) -> None:
        """Remove all files but the logs."""
        own = [self.token_path, self.admin_token_path, self.manifest_path, self.gateway_state_path, self.record_path]
        for path in [*own, *self.path.glob("*.measured")]:
            path.unlink(missing_ok=True)

    def read_admin_token(self) -> str | None:
        """Return what callers of Admin show; None when they need not show anything."""
        try:
            return self.admin_token_path.read_text(encoding="ascii")
        except FileNotFoundError:
            return None

    def write_record(self, record: GroupRecord) -> None:
        """Write the group's record."""
        write_atomically(self.record_path, json.dumps(asdict(record), indent=2) + "\n")

    def read_record(self) -> GroupRecord | None:
        """Return the record; None if there is none or another version wrote it."""
        data = read_json_object(self.record_path)
        try:
            return None if data is None else GroupRecord(**data)
        except TypeError:
            return None

    def read_gateway_state(self) -> Mapping[str, Any] | None:
        """Return the state that the gateway wrote; None until it listens."""
        return read_json_object(self.gateway_state_path)


def running_groups(home: HeteroHome) -> list[GroupRecord]:
    """Return the records of all running groups, by name."""
    folders = sorted(path.parent for path in home.runs.glob("*/lock"))
    records = [RunDirectory(folder).read_record() for folder in folders if is_held(folder / "lock")]
    return [record for record in records if record is not None]


def find_group(home: HeteroHome, name: str | None = None) -> GroupRecord:
    """Return the running group of that name, or the only one. Raises NoGroupError."""
    groups = running_groups(home)
    if name is not None:
        groups = [group for group in groups if group.name == name]
    if len(groups) == 1:
        return groups[0]
    if groups:
        names = ", ".join(group.name for group in groups)
        raise NoGroupError(f"several local groups run ({names}); choose one with --group NAME or --address HOST:PORT")
    what = "no local group runs" if name is None else f"no local group named {name!r} runs"
    raise NoGroupError(f"{what}; start one with `hetero up FILE`, or give --address HOST:PORT")


VALID_S: Final = 24 * 3600.0
_MEASURED_AT: Final = "measured_at"
_DISTURBED: Final = "disturbed"
_KEY_DIGITS: Final = 16


class MeasurementStore:
    """Measurements of one group, whose ranks are `ranks`."""

    def __init__(self, folder: Path, ranks: Sequence[str], *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._ranks = tuple(ranks)
        self._clock = clock

    @classmethod
    def for_group(
        cls, home: HeteroHome, name: str, resource: HeteroInference, *, model_dir: Path, plan: LocalPlan
    ) -> Self:
        """Return the group's measurements; another manifest, model or plan has others."""
        inputs = [resource.model_dump(mode="json"), str(model_dir), [asdict(rank) for rank in plan.ranks]]
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
        return cls(home.measured / f"{name}-{key}", [rank.name for rank in plan.ranks])

    def copy_to(self, run: RunDirectory) -> None:
        """Copy kept measurements to the run's directory, if all ranks have some and none is too old."""
        times = [_measured_at(self._path(rank)) for rank in self._ranks]
        if all(time_s is not None and 0 <= self._clock() - time_s < VALID_S for time_s in times):
            for rank in self._ranks:
                shutil.copyfile(self._path(rank), run.measurements_path(rank))

    def save_from(self, run: RunDirectory) -> float | None:
        """Keep the measurements of the run's ranks; return when the oldest was taken, in seconds since 1970.

        Keeps nothing and returns None if a rank has none, or was disturbed. Raises OSError if they cannot be written.
        """
        times = [_measured_at(run.measurements_path(rank)) for rank in self._ranks]
        known = [time_s for time_s in times if time_s is not None]
        if not known or len(known) < len(times):
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank in self._ranks:
            write_atomically(self._path(rank), run.measurements_path(rank).read_text(encoding="utf-8"))
        self._remove_old()
        return min(known)

    def discard(self) -> None:
        """Remove the measurements, so that the next start repeats them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, rank: str) -> Path:
        return self.folder / f"{rank}.measured"

    def _remove_old(self) -> None:
        """Remove measurements that are too old, other groups' too."""
        for folder in self.folder.parent.iterdir():
            with suppress(OSError):  # its own group may do the same
                newest_s = max((_measured_at(path) or 0.0 for path in folder.iterdir()), default=0.0)
                if self._clock() - newest_s >= VALID_S:
                    shutil.rmtree(folder)


def _measured_at(path: Path) -> float | None:
    """Return the time of a file's measurements; None if there is none, or others disturbed them."""
    try:
        data = read_json_object(path) or {}
    except (OSError, ValueError):
        return None
    time_s = data.get(_MEASURED_AT)
    return float(time_s) if isinstance(time_s, int | float) and not data.get(_DISTURBED) else None
