"""A small program with the worker's command line: joins the stand-in gateway, and joins it again when it was
gone. With the argument "forkserver" it forks such ranks, as hetero_worker.process.forkserver does.

It has a heartbeat as a rank has, and says that it did a step once it joined. STAND_IN_RANKS makes ranks misbehave:
"NAME=BEHAVIOUR;..." with "exit:N" (logs a line and ends), "fail:REASON" (tells the gateway a
permanent failure, ends with 3), "hang" (ignores SIGTERM and the gateway's end), "stuck" (from the start works longer
than it may), "later-exit:N" (the first process is well, those that replace it end before they did anything).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, ENV_HEARTBEAT_FILE, EXIT_PERMANENT
from hetero_api.host.heartbeat import Heartbeat, RankState
from hetero_worker.process.forkserver import serve

OPTIONS = (
    "gateway", "model", "pool", "ordinal", "local-rank", "pod-name", "device", "cores", "communication-cores",
    "num-threads", "numa-policy", "memory-bytes", "store-host", "reconnect-timeout-s", "measurements-file",
)  # fmt: skip


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser()
    for name in OPTIONS:
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args(arguments)
    heartbeat = Heartbeat.open(Path(environment[ENV_HEARTBEAT_FILE]))
    heartbeat.keep_pulse()
    print(f"INFO rank {args.pod_name} pid {os.getpid()} args {' '.join(arguments)}", file=sys.stderr, flush=True)
    Path(environment[ENV_GROUP_TOKEN_FILE]).read_text(encoding="ascii")
    behaviours = dict(pair.split("=", 1) for pair in environment.get("STAND_IN_RANKS", "").split(";") if pair)
    first = Path(args.measurements_file)  # the launcher clears it when it starts
    verb, rest = behaviour(behaviours.get(args.pod_name, ""), is_first=not first.exists())
    first.touch()
    return be(verb, rest, args=args, heartbeat=heartbeat)


def behaviour(text: str, *, is_first: bool) -> tuple[str, str]:
    verb, _, rest = text.partition(":")
    if verb == "later-exit":
        return ("", "") if is_first else ("exit", rest)
    return verb, rest


def be(verb: str, rest: str, *, args: argparse.Namespace, heartbeat: Heartbeat) -> int:
    if verb == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    host, _, port = args.gateway.rpartition(":")
    while True:
        with suppress(OSError), socket.create_connection((host, int(port))) as gateway:
            if verb == "fail":
                gateway.sendall(f"fail {rest}\n".encode())
                return EXIT_PERMANENT
            if verb == "exit":
                print("ERROR the stand-in rank was told to end", file=sys.stderr)
                return int(rest)
            gateway.sendall(f"join {args.pod_name}\n".encode())
            heartbeat.enter(RankState.SERVING, epoch=1)
            heartbeat.count_step()
            if verb == "stuck":
                with heartbeat.working(0.5):
                    signal.pause()
            while gateway.recv(1):
                pass
        while verb == "hang":
            signal.pause()
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1:] == ["forkserver"]:
        if os.environ.get("STAND_IN_FORKSERVER") == "broken":
            sys.exit("ERROR the stand-in forkserver was told to end")
        serve(main, orders=sys.stdin, answers=sys.stdout)
    else:
        sys.exit(main(sys.argv[1:], os.environ))
