"""Errors of the client side.

    HeteroError (hetero_api)
    └── ClientError                     .exit_code: exit code of the `hetero` command
        ├── RequestError                a call ended with a status other than OK
        │   ├── InvalidRequestError     .violations: the fields, and the problem with each
        │   ├── DuplicateRequestError   the request id is in flight already
        │   ├── QueueFullError          .retry_after_s: when to try again
        │   ├── UnavailableError        loading, draining, or the group was lost
        │   │   └── NotConnectedError   nothing answers at the address, or the connection broke
        │   ├── DeadlineError           the deadline passed first
        │   ├── RequestCancelledError   the call was cancelled
        │   ├── AccessError             the caller is unknown, or not allowed to call
        │   ├── WrongStateError         the server's state does not allow the call
        │   └── ServerError             a fault in the server
        ├── CredentialsError            a key or its file cannot be used
        ├── IncompleteStreamError       a stream ended without its Finished event
        ├── NoGroupError                no running group to talk to, or several
        ├── ModelStoreError             a model that cannot be fetched or cannot be served
        │   ├── MissingExtraError       an optional part of the installation is missing
        │   ├── HubUnreachableError     the Hub does not answer, or a transfer broke off
        │   ├── DamagedFileError        a fetched file is not what the Hub has
        │   └── ModelSourceError        spec.model.uri cannot be used on this machine
        └── LaunchError                 a local group could not be started or kept running
            ├── LocalSpecError          the manifest does not fit this machine; .problems
            ├── AlreadyRunningError     a group of this name runs; .pid
            ├── PortTakenError          another program listens on the port
            ├── ProcessDiedError        a process of the group ended; .exit_status, .log_tail
            │   └── RestartsExhaustedError  once more often than spec.recovery allows
            ├── GroupFailedError        the gateway says that trying again cannot help
            ├── StartTimeoutError       the group did not become ready in time
            └── StartInterruptedError   a signal came before the work was done; .signal_number

Library errors (grpc, huggingface_hub, OSError) become these at one boundary each: `channel.py`, `model_store/hub.py`,
and where a file is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_api.contract import EXIT_FAILURE, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.errors import HeteroError


class ClientError(HeteroError):
    """Root of the client's errors."""

    exit_code: int = EXIT_FAILURE


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of a request and the problem with it."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}" if self.field else self.description


class RequestError(ClientError):
    """A call ended with a status other than OK. `code` is its name in gRPC, e.g. "UNAVAILABLE"."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class InvalidRequestError(RequestError):
    """The request is wrong; sending it again cannot help."""

    exit_code = EXIT_USAGE

    def __init__(
        self, message: str, *, violations: Sequence[FieldViolation] = (), code: str = "INVALID_ARGUMENT"
    ) -> None:
        super().__init__("; ".join(map(str, violations)) or message, code=code)
        self.violations = tuple(violations)


class DuplicateRequestError(RequestError):
    """A request with this id is in flight."""


class QueueFullError(RequestError):
    """The server's queue is full. `retry_after_s` is its advice, None if it gave none."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, code: str = "RESOURCE_EXHAUSTED") -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class UnavailableError(RequestError):
    """The server cannot serve now; trying later can help."""


class NotConnectedError(UnavailableError):
    """Nothing answers at the address, or the connection broke."""


class DeadlineError(RequestError):
    """The deadline passed before the call ended."""


class RequestCancelledError(RequestError):
    """The call was cancelled."""


class AccessError(RequestError):
    """The server does not know the caller, or does not allow the call."""


class WrongStateError(RequestError):
    """The server is not in a state that allows the call."""


class ServerError(RequestError):
    """A fault in the server."""


class CredentialsError(ClientError):
    """A key, or the file that holds it, cannot be used."""

    exit_code = EXIT_USAGE


class IncompleteStreamError(ClientError):
    """A Generate stream ended with OK but without Finished."""


class NoGroupError(ClientError):
    """No address was given and there is no single running group to take it from."""

    exit_code = EXIT_USAGE


class ModelStoreError(ClientError):
    """A model cannot be fetched, or cannot be served."""

    exit_code = EXIT_PERMANENT


class MissingExtraError(ModelStoreError):
    """An optional part of the installation is missing."""


class HubUnreachableError(ModelStoreError):
    """The Hub does not answer, or a transfer broke off; trying again can help."""

    exit_code = EXIT_FAILURE


class DamagedFileError(ModelStoreError):
    """A fetched file differs from the Hub's and must be fetched again."""

    exit_code = EXIT_FAILURE


class ModelSourceError(ModelStoreError):
    """A model URI cannot be used here."""

    exit_code = EXIT_USAGE


class LaunchError(ClientError):
    """A local group could not be started or kept running."""


class LocalSpecError(LaunchError):
    """A manifest does not fit this machine. `problems` are `path: problem`, one each."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class AlreadyRunningError(LaunchError):
    """A group of this name runs already."""

    exit_code = EXIT_USAGE

    def __init__(self, name: str, *, pid: int | None) -> None:
        who = f"pid {pid}" if pid else "another process"
        super().__init__(
            f"group {name!r} is running already ({who}); stop it with `hetero down {name}`, "
            "or change metadata.name in the manifest"
        )
        self.pid = pid


class PortTakenError(LaunchError):
    """Another program listens on the port."""

    exit_code = EXIT_USAGE


class ProcessDiedError(LaunchError):
    """A process of the group ended by itself. `permanent`: it reported why, and its exit status becomes ours."""

    def __init__(
        self, message: str, *, exit_status: int, log_tail: Sequence[str] = (), permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.log_tail = tuple(log_tail)
        if permanent:
            self.exit_code = exit_status


class RestartsExhaustedError(ProcessDiedError):
    """A process ended, and the group's budget of restarts is used up."""


class GroupFailedError(LaunchError):
    """The gateway says that the group failed and that trying again cannot help."""

    exit_code = EXIT_PERMANENT


class StartTimeoutError(LaunchError):
    """The group did not become ready in time."""


class StartInterruptedError(LaunchError):
    """A signal came before the group was ready, or its one answer complete."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("interrupted; all processes of the group were stopped")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
