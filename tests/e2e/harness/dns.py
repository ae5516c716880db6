"""A name server for the Services of one cluster: what the DNS addon is to its pods, where no image of one can be had.

It answers A queries for SERVICE.NAMESPACE.svc.DOMAIN, and for HOSTNAME.SERVICE.NAMESPACE.svc.DOMAIN of pods that have a
hostname, by asking the API server each time, so an answer is never old. A headless Service has the addresses of its
ready pods, and of all of them where it publishes these. Whatever else is asked for does not exist: nodes of tests have
no internet.

Specification of the names: github.com/kubernetes/dns, docs/specification.md; of the messages: RFC 1035.
Run as `python -m tests.e2e.harness.dns KUBECONFIG ADDRESS`.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.e2e.harness.access import client_of
from tests.support.kube.client import Client, Object

PORT = 53
DOMAIN = "cluster.local"
A, ANY_CLASS_IN = 1, 1
RESPONSE_FLAGS = 0x8580  # an answer, authoritative, to a query that asked for recursion, which is at hand
NO_SUCH_NAME = 3
TTL_S = 1
HEADER = struct.Struct("!6H")
QUESTION = struct.Struct("!2H")

Lookup = Callable[[str], list[str] | None]
"""IPv4 addresses of a name, in lower case and without a dot at its end; None where there is no such name."""


class Query(NamedTuple):
    """A message with one question, as all resolvers send them."""

    id: int
    name: str
    type: int
    question: bytes
    """As it was on the wire; the answer repeats it."""


def parse(message: bytes) -> Query:
    """Raises ValueError for anything but one question."""
    if len(message) < HEADER.size:
        raise ValueError("shorter than a header")
    identity, _, questions, *_ = HEADER.unpack_from(message)
    if questions != 1:
        raise ValueError(f"{questions} questions")
    labels, at = [], HEADER.size
    while at < len(message) and (length := message[at]):
        labels.append(message[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    end = at + 1 + QUESTION.size
    if end > len(message):
        raise ValueError("the question is cut off")
    kind, _ = QUESTION.unpack_from(message, at + 1)
    return Query(identity, ".".join(labels).lower(), kind, message[HEADER.size : end])


def answer(query: Query, lookup: Lookup) -> bytes:
    """The reply: all addresses, none where only other types of record are asked for, or that there is no such name."""
    found = lookup(query.name)
    addresses = found if found and query.type == A else []
    code = NO_SUCH_NAME if found is None else 0
    header = HEADER.pack(query.id, RESPONSE_FLAGS | code, 1, len(addresses), 0, 0)
    return header + query.question + b"".join(map(_record, addresses))


def _record(address: str) -> bytes:
    name = struct.pack("!H", 0xC000 | HEADER.size)  # "the name in the question"
    return name + struct.pack("!2HIH", A, ANY_CLASS_IN, TTL_S, 4) + ipaddress.IPv4Address(address).packed


def services(client: Client, domain: str = DOMAIN) -> Lookup:
    """Looks names up in a cluster."""

    def lookup(name: str) -> list[str] | None:
        head, found, rest = name.partition(f".svc.{domain}")
        parts = head.split(".")
        if not found or rest or len(parts) not in (2, 3):
            return None
        hostname, service_name, namespace = ["", *parts][-3:]
        service = client.find("Service", service_name, namespace)
        if service is None:
            return None
        if service["spec"].get("clusterIP") not in (None, "None"):
            return [service["spec"]["clusterIP"]] if not hostname else None
        endpoints = client.find("Endpoints", service_name, namespace) or {}
        addresses = [one["ip"] for one in _addresses(endpoints) if hostname in ("", one.get("hostname"))]
        return addresses or (None if hostname else [])

    return lookup


def _addresses(endpoints: Object) -> Iterable[Object]:
    # The endpoints controller lists pods that are not ready as ready where the Service publishes them.
    for subset in endpoints.get("subsets") or []:
        yield from subset.get("addresses") or []


def serve(server: socket.socket, lookup: Lookup) -> None:
    """For ever. No query, or no API server to ask, is no answer: resolvers ask again."""
    while True:
        message, sender = server.recvfrom(4096)
        try:
            reply = answer(parse(message), lookup)
        except Exception as error:
            print(f"no answer to {sender}: {error}", file=sys.stderr, flush=True)
            continue
        server.sendto(reply, sender)


def main(kubeconfig: Path, address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server, client_of(kubeconfig) as client:
        server.bind((address, PORT))
        serve(server, services(client))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
