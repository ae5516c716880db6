"""A Secret's volume as the kubelet keeps it in a pod: exchanged as a whole, by one rename.

Contents lie in a folder that is named for its time, `..2030_01_02_03_04_05.1`. The link `..data` leads to it, and what
programs open, `tls.crt`, is a link to `..data/tls.crt`. For new contents the kubelet makes another folder, lets a new
link `..data_tmp` lead there, renames it over `..data`, and removes the folder that was there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_DATA: Final = "..data"
_NEXT: Final = "..data_tmp"


class SecretVolume:
    """A mounted Secret: `folder` is what programs are told."""

    def __init__(self, folder: Path, data: Mapping[str, bytes]) -> None:
        self.folder = folder
        self._num_written = 0
        folder.mkdir()
        self.write(data)

    def write(self, data: Mapping[str, bytes]) -> None:
        """Put these contents in the place of those that are there."""
        self._num_written += 1
        new = self.folder / f"..{datetime.now(UTC):%Y_%m_%d_%H_%M_%S}.{self._num_written}"
        new.mkdir()
        for name, content in data.items():
            (new / name).write_bytes(content)
        link = self.folder / _DATA
        old = link.resolve() if link.is_symlink() else None
        (self.folder / _NEXT).symlink_to(new.name)
        os.rename(self.folder / _NEXT, link)
        for name in data:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"{_DATA}/{name}")
        if old is not None:
            shutil.rmtree(old)
