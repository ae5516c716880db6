"""Files of the front door, read again when they change: those of Secrets, which the kubelet replaces.

They are looked at every few seconds. Notifications of the file system would not do: a Secret's folder is a link that
is changed as a whole, and some file systems have none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from hetero_api.api_keys import read_keys
from hetero_gateway.server.access.keys import KeyRing
from hetero_gateway.server.access.tls import ServerTls, TlsFiles

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""The kubelet itself takes up to a minute."""


class FileWatch:
    """Files that `read` reads, again when one changes. It may raise any error, and then changes nothing."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], None], *, look_s: float = LOOK_S) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._look_s = look_s
        self._seen = self._signature()
        self._problem = ""

    async def run(self) -> None:
        """Read the files again after every change, until cancelled; those that cannot be read, again and again."""
        while True:
            await asyncio.sleep(self._look_s)
            if self._problem or self._signature() != self._seen:
                await self._reload()

    async def _reload(self) -> None:
        # First: a change while they are read is seen at the next look.
        self._seen = self._signature()
        names = ", ".join(map(str, self._paths))
        try:
            await asyncio.to_thread(self._read)
        except Exception as error:  # noqa: BLE001 — whatever a file holds, the gateway serves on
            if repr(error) != self._problem:
                logger.error("%s: cannot be used, so what was read before stays in force: %s", names, error)
            self._problem = repr(error)
        else:
            self._problem = ""
            logger.info("%s: changed, and was read again", names)

    def _signature(self) -> tuple[object, ...]:
        return tuple(map(_signature_of, self._paths))


def _signature_of(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """Contents of a gateway's files about access, and what keeps them up to date."""

    keys: KeyRing | None = None
    tls: ServerTls | None = None
    """Certificate of the doors."""
    inside: ServerTls | None = None
    """Certificate for ranks and administrators, who must show one of its authority."""
    watches: tuple[FileWatch, ...] = ()

    @classmethod
    def load(
        cls,
        *,
        keys_file: Path | None = None,
        tls_files: TlsFiles | None = None,
        inside_folder: Path | None = None,
        look_s: float = LOOK_S,
    ) -> Self:
        """Read the files. A file that changes and is wrong changes nothing, and the log says why.

        Raises ManifestError for a keys file that is wrong now, and TlsError for a certificate.
        """
        keys = None if keys_file is None else _watched_keys(keys_file, look_s)
        tls = None if tls_files is None else _watched_tls(tls_files, look_s)
        inside = None if inside_folder is None else _watched_tls(TlsFiles(inside_folder, inside_folder), look_s)
        watches = tuple(each[1] for each in (keys, tls, inside) if each is not None)
        return cls(keys[0] if keys else None, tls[0] if tls else None, inside[0] if inside else None, watches)


# A watch looks at its files before they are read, so it sees every later change.


def _watched_keys(file: Path, look_s: float) -> tuple[KeyRing, FileWatch]:
    """Return the keys in a file, and what keeps them up to date."""
    watch = FileWatch([file], lambda: keys.replace(read_keys(file)), look_s=look_s)
    keys = KeyRing(read_keys(file))
    return keys, watch


def _watched_tls(files: TlsFiles, look_s: float) -> tuple[ServerTls, FileWatch]:
    """Return the certificate in files, and what keeps it up to date."""

    def read() -> None:
        tls.load()

    watch = FileWatch(files.paths, read, look_s=look_s)
    tls = ServerTls(files)
    return tls, watch
