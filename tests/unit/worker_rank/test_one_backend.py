"""A rank's device is the business of its backend: no other module asks what it is, or calls its driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

WORKER = Path(__file__).resolve().parents[3] / "worker" / "hetero_worker"
ASKS = re.compile(r"\bdevice\.type\b|\bis_host\b|\bis_cuda\b|\bis_cpu\b|[!=]= HOST\b|\bHOST\.type\b|\btorch\.cuda\b")
MAY_ASK = {
    "distributed/device_group.py": "NCCL's groups are made on a device",
    "distributed/native_ends.py": "bytes are exchanged where they lie, so a tensor elsewhere is an error",
    "memory/streams.py": "a copy to the host's own memory needs none that is pinned",
}
NAMES_CUDA = {
    "distributed/device_group.py": "NCCL",
    "pod/config.py": "option of the command line",
    "pod/ranks.py": "option of the command line",
    "probe/program.py": "chooses the backend",
    "process/config.py": "option of the command line",
    "process/rank.py": "chooses the backend",
}


def those_with(pattern: re.Pattern[str]) -> set[str]:
    """Modules outside the backends with a line that has the pattern."""
    found = {str(path.relative_to(WORKER)) for path in WORKER.rglob("*.py") if pattern.search(path.read_text())}
    return {name for name in found if not name.startswith("backends/")}


def test_only_backends_ask_what_a_device_is() -> None:
    assert those_with(ASKS) == set(MAY_ASK)


def test_cuda_is_named_in_its_backend_and_six_modules_more() -> None:
    assert those_with(re.compile(r"\bcuda\b", re.IGNORECASE)) == set(NAMES_CUDA)
