"""What can go wrong in the harness itself.

KubeHarnessError
├── BinariesMissing      a server program cannot be had; the message says what was tried
├── ProvisionFailed      a download, an archive or a build went wrong
│   └── SourceUnreachable    the source is not there from this machine: the next one may be
├── ComponentFailed      a server process ended or was not ready in time; the message ends with its log
└── ApiError             the API server refused a call of the test client
    ├── NotFound         404
    └── Conflict         409
"""

from __future__ import annotations

from typing import Any


class KubeHarnessError(Exception):
    """The harness failed, not what it tests."""


class BinariesMissing(KubeHarnessError):
    """A server program cannot be had."""


class ProvisionFailed(KubeHarnessError):
    """A source of server programs answered, but with something unusable."""


class SourceUnreachable(ProvisionFailed):
    """A source of server programs is not there from this machine."""


class ComponentFailed(KubeHarnessError):
    """etcd or a Kubernetes server did not start, or ended."""


class ApiError(KubeHarnessError):
    """A call was refused. `status` is the server's Status object."""

    def __init__(self, code: int, call: str, status: dict[str, Any]) -> None:
        super().__init__(f"{call}: {code} {status.get('reason', '')}: {status.get('message', '')}")
        self.code = code
        self.status = status

    @property
    def reason(self) -> str:
        return str(self.status.get("reason", ""))

    @property
    def message(self) -> str:
        return str(self.status.get("message", ""))


class NotFound(ApiError):
    """404."""


class Conflict(ApiError):
    """409: it exists already, or another field manager owns the field."""
