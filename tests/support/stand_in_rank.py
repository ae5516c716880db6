"""A small program with the worker's command line: joins the stand-in gateway and stays until it is gone.

STAND_IN_RANKS makes ranks misbehave: "NAME=BEHAVIOUR ..." with "exit:N" (ends after joining, having logged a
line), "fail:REASON" (tells the gateway a permanent failure, ends with 3), "hang" (ignores SIGTERM and the
gateway's end), "trace" (as exit:1, with the marks of a stack trace in its log).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, EXIT_OK, EXIT_PERMANENT

OPTIONS = (
    "gateway", "model", "pool", "ordinal", "local-rank", "pod-name", "cores", "num-threads", "numa-policy",
    "memory-bytes", "store-host",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in OPTIONS:
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    print(f"INFO rank {args.pod_name} args {' '.join(sys.argv[1:])}", file=sys.stderr, flush=True)
    Path(os.environ[ENV_GROUP_TOKEN_FILE]).read_text(encoding="ascii")
    behaviours = dict(pair.split("=", 1) for pair in os.environ.get("STAND_IN_RANKS", "").split(";") if pair)
    verb, _, rest = behaviours.get(args.pod_name, "").partition(":")
    if verb == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    host, _, port = args.gateway.rpartition(":")
    with socket.create_connection((host, int(port))) as gateway:
        if verb == "fail":
            gateway.sendall(f"fail {rest}\n".encode())
            return EXIT_PERMANENT
        gateway.sendall(f"join {args.pod_name}\n".encode())
        if verb == "exit":
            print("ERROR the stand-in rank was told to end", file=sys.stderr)
            return int(rest)
        while gateway.recv(1):
            pass
    while verb == "hang":
        signal.pause()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
