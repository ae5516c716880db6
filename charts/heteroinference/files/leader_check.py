"""`helm test`: whether exactly one of the operator's pods leads.

    python leader_check.py SERVICE PORT SECONDS

The metrics Service is headless: its name has the address of every pod that is ready. Each is asked for its metrics
until one says that it leads and the others say that they do not. Nothing but Python's standard library is used.
"""

import socket
import sys
import time
import urllib.request

LEADER = "hetero_operator_leader"


def addresses(service: str, port: int) -> list[str]:
    """Of the pods, as text that fits into a URL; none while the name is not known."""
    try:
        found = socket.getaddrinfo(service, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    hosts = {(family, str(address[0])) for family, _, _, _, address in found}
    return sorted(f"[{host}]" if family == socket.AF_INET6 else host for family, host in hosts)


def leads(address: str, port: int) -> bool | None:
    """What a pod says of itself; None: it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    return any(line.split()[0] == LEADER and float(line.split()[-1]) == 1 for line in lines if line)


def main() -> int:
    service, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    deadline = time.monotonic() + seconds
    while True:
        pods = {address: leads(address, port) for address in addresses(service, port)}
        words = {True: "leads", False: "waits", None: "does not answer"}
        seen = ", ".join(f"{address} {words[state]}" for address, state in pods.items()) or f"{service} has no pods"
        if list(pods.values()).count(True) == 1:
            print(seen)
            return 0
        if time.monotonic() > deadline:
            print(f"no single leader within {seconds:g} s: {seen}", file=sys.stderr)
            return 1
        time.sleep(1)


sys.exit(main())
