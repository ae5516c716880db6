"""The operator's settings: each an argument `--some-setting` or a variable HETERO_OPERATOR_SOME_SETTING.

The argument wins. The environment is read here and nowhere else. Errors name the argument or variable.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from hetero_api.contract import VERSION
from hetero_api.program import ProgramParser
from hetero_operator.errors import ConfigError
from hetero_operator.reconcile.model import ANY_NAME, DEFAULT_DNS, Policy, RenderOptions

PROGRAM: Final = "hetero_operator"
PREFIX: Final = "HETERO_OPERATOR_"
IMAGES: Final = "heteroinference"
DEFAULT_LEASE: Final = "heteroinference-operator"

_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME_PATTERN: Final = re.compile(r"[-A-Za-z0-9*._:/@]+")
_POD_LABEL: Final = re.compile(r"[a-z0-9][-a-z0-9]*/([-a-z0-9.]+/)?[-A-Za-z0-9_.]+=[-A-Za-z0-9_.]+")
_FOLDER: Final = re.compile(r"/[^,'\\]*")
_DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Settings of the election. Times are in seconds; `retry_s` < `renew_s` < `duration_s`."""

    name: str
    namespace: str
    identity: str
    """Differs from that of every other process that lives at the same time."""
    duration_s: float = 15.0
    """A Lease that was not renewed for so long is anyone's."""
    renew_s: float = 10.0
    """A leader that could not renew for so long writes no more."""
    retry_s: float = 2.0
    """Pause between attempts, and between renewals."""


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """Settings of the process."""

    kubeconfig: Path | None
    """None: in a cluster the pod's own account, elsewhere $KUBECONFIG or ~/.kube/config."""
    namespaces: tuple[str, ...]
    """Namespaces that are looked after; empty: all."""
    render: RenderOptions
    policy: Policy
    lease: LeaseConfig
    host: str
    """Address that metrics and health are served at."""
    metrics_port: int
    health_port: int
    resync_s: float
    """Seconds between listings of all resources, in case a change was missed."""
    workers: int
    """Resources that are reconciled at the same time, at most."""
    log_level: str

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> OperatorConfig:
        """Return the settings. Raises ConfigError; a wrong command line ends the process with EXIT_USAGE."""
        given = vars(_parser().parse_args(list(arguments)))
        values = {setting.name: setting.read(given, environment) for setting in SETTINGS}
        render = RenderOptions(
            operator_version=VERSION,
            operator_namespace=values["own_namespace"],
            # The operator's own pod has an address of the family that all pods of the cluster have.
            any_address="::" if ":" in values["host"] else "0.0.0.0",
            **_named_alike(RenderOptions, values),
        )
        return cls(
            render=render,
            policy=Policy(**_named_alike(Policy, values)),
            lease=_lease(values),
            resync_s=values["resync_seconds"],
            **_named_alike(cls, values),
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `parse` raises ValueError saying what is expected."""

    name: str
    parse: Callable[[str], Any]
    default: str
    help: str

    @property
    def argument(self) -> str:
        """The command line argument."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    def read(self, given: Mapping[str, str | None], environment: Mapping[str, str]) -> Any:
        """Return the value. Raises ConfigError, which names where the text came from."""
        text, source = given[self.name], self.argument
        if text is None:
            text, source = environment.get(self.variable, self.default), self.variable
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{source}: {text!r} {error}") from error


def _text(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text and not pattern.fullmatch(text):
            raise ValueError(f"is no {what}")
        return text

    return parse


def _required(text: str) -> str:
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError("must be text without spaces around it")
    return text


def _namespaces(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    wrong = [name for name in names if not _DNS_LABEL.fullmatch(name)]
    if wrong:
        raise ValueError(f"must be namespaces with commas between them: {wrong[0]!r} is none")
    return tuple(dict.fromkeys(names))


def _folders(text: str) -> tuple[str, ...]:
    folders = _entries(text)
    for folder in folders:
        if not _FOLDER.fullmatch(folder) or ".." in folder.split("/"):
            raise ValueError(f"must be absolute paths without '..', commas between them: {folder!r} is none")
    return folders


def _patterns(text: str) -> tuple[str, ...]:
    patterns = _entries(text)
    for pattern in patterns:
        if not _NAME_PATTERN.fullmatch(pattern):
            raise ValueError(f"must be names with commas between them, '*' for any text: {pattern!r} is none")
    return patterns


def _name_servers(text: str) -> tuple[str, ...]:
    entries = _entries(text)
    for entry in entries:
        if entry != ANY_NAME and not _POD_LABEL.fullmatch(entry) and not _is_network(entry):
            raise ValueError(
                f"must be NAMESPACE/LABEL=VALUE or CIDRs with commas between them, or *: {entry!r} is none"
            )
    return entries


def _ports(text: str) -> tuple[int, ...]:
    return tuple(map(_number(int, 1, 65535), _entries(text)))


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return "/" in text


def _entries(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.strip() for entry in text.split(","))) if text.strip() else ()


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def _user_range(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()) or not 0 < int(first) < int(last) < 2**31:
        raise ValueError("must be two uids above 0 that rise, such as 1000000000-1999999999")
    return int(first), int(last)


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError("is no number" if kind is float else "is no whole number") from None
        if not low <= value <= high:
            raise ValueError(f"must be from {low:g} to {high:g}")
        return value

    return parse


def _level(text: str) -> str:
    if text.upper() not in logging.getLevelNamesMapping():
        raise ValueError("is no logging level such as INFO or DEBUG")
    return text.upper()


def _path(text: str) -> Path | None:
    if text and not Path(text).is_file():
        raise ValueError("is no file")
    return Path(text) if text else None


SETTINGS: Final = (
    Setting("kubeconfig", _path, "", "kubeconfig file; none: the pod's account, or KUBECONFIG"),
    Setting("namespaces", _namespaces, "", "namespaces that are looked after, commas between; none: all"),
    Setting("gateway_image", _required, f"{IMAGES}/gateway:{VERSION}", "image of gateways"),
    Setting("router_image", _required, f"{IMAGES}/router:{VERSION}", "image of routers"),
    Setting("cpu_worker_image", _required, f"{IMAGES}/worker-cpu:{VERSION}", "image of CPU ranks"),
    Setting("gpu_worker_image", _required, f"{IMAGES}/worker-gpu:{VERSION}", "image of GPU ranks"),
    Setting("cluster_domain", _text(_DNS_NAME, "DNS domain"), "cluster.local", "DNS domain of the cluster"),
    Setting("cluster_dns", _name_servers, ",".join(DEFAULT_DNS), "name servers that pods may ask; *: any"),
    Setting("api_server_ports", _ports, "443,6443", "ports of the API server, which routers may ask"),
    Setting(
        "inside_tls", _switch, "false", "whether gateways, ranks and the operator know one another by certificates"
    ),
    Setting("run_as_user", _number(int, 0, 2**31 - 1), "65532", "uid that gateways and ranks run as; 0: the cluster's"),
    Setting(
        "namespace_users", _user_range, "", "FIRST-LAST: pods of each namespace get an own uid of these; none: one"
    ),
    Setting("allowed_host_paths", _folders, "", "folders of nodes that pods may mount, commas between; none: none"),
    Setting("allowed_images", _patterns, ANY_NAME, "images that resources may name, commas between, * for any text"),
    Setting("allowed_secrets", _patterns, ANY_NAME, "Secrets that resources may name, likewise"),
    Setting("allowed_priority_classes", _patterns, ANY_NAME, "PriorityClasses that resources may name, likewise"),
    Setting("allowed_schedulers", _patterns, ANY_NAME, "schedulers that resources may name, likewise"),
    Setting("allowed_runtime_classes", _patterns, ANY_NAME, "RuntimeClasses that resources may name, likewise"),
    Setting("own_namespace", _text(_DNS_LABEL, "namespace"), "", "where the operator runs; none: not in a cluster"),
    Setting("identity", _text(_DNS_NAME, "name"), "", "name in the Lease, the pod's; none: one is made up"),
    Setting("lease_name", _text(_DNS_NAME, "name"), DEFAULT_LEASE, "Lease that the leader holds"),
    Setting("lease_namespace", _text(_DNS_LABEL, "namespace"), "", "its namespace; none: the operator's, or default"),
    Setting("lease_seconds", _number(float, 1, 600), "15", "a Lease not renewed for so long is anyone's"),
    Setting("lease_renew_seconds", _number(float, 0.5, 600), "10", "without renewal for so long a leader stops"),
    Setting("lease_retry_seconds", _number(float, 0.1, 60), "2", "between attempts"),
    Setting("host", _required, "127.0.0.1", "address to serve metrics and health at"),
    Setting("metrics_port", _number(int, 0, 65535), "8080", "port of /metrics; 0: any free one"),
    Setting("health_port", _number(int, 0, 65535), "8081", "port of /healthz and /readyz; 0: any free one"),
    Setting("resync_seconds", _number(float, 5, 3600), "45", "between listings of all resources"),
    Setting("workers", _number(int, 1, 500), "50", "resources reconciled at the same time"),
    Setting("log_level", _level, "INFO", "what is logged, and worse"),
)


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(prog=PROGRAM, description="The Kubernetes operator of HeteroInference.", allow_abbrev=False)
    for setting in SETTINGS:
        parser.add_argument(setting.argument, help=f"{setting.help} [{setting.variable}]", metavar="VALUE")
    return parser


def _named_alike(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings whose names are those of fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _lease(values: Mapping[str, Any]) -> LeaseConfig:
    lease = LeaseConfig(
        name=values["lease_name"],
        namespace=values["lease_namespace"] or values["own_namespace"] or "default",
        identity=values["identity"] or _made_up_identity(),
        duration_s=values["lease_seconds"],
        renew_s=values["lease_renew_seconds"],
        retry_s=values["lease_retry_seconds"],
    )
    if not lease.retry_s < lease.renew_s < lease.duration_s:
        raise ConfigError(
            f"{PREFIX}LEASE_RETRY_SECONDS ({lease.retry_s:g}), {PREFIX}LEASE_RENEW_SECONDS ({lease.renew_s:g}) and "
            f"{PREFIX}LEASE_SECONDS ({lease.duration_s:g}) must rise in this order"
        )
    return lease


def _made_up_identity() -> str:
    # The host's name alone would let two processes of one host both believe that they hold the Lease.
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
