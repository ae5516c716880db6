"""All fuzz targets, by name. A new reader of bytes from elsewhere gets one."""

from __future__ import annotations

from typing import Final

from tests.unit.fuzz import model_files, ranks, requests
from tests.unit.fuzz.target import Target

TARGETS: Final[dict[str, Target]] = {
    target.name: target for target in (*model_files.TARGETS, *requests.TARGETS, *ranks.TARGETS)
}
