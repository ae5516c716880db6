"""A small program with the gateway's command line and no engine: what the launcher needs of a gateway.

It counts ranks that are connected to its ranks port as joined, is READY while all of the manifest are, and answers
Generate like FakeGateway. STAND_IN_GATEWAY makes it misbehave: "exit:N", "ignore-term", "never-ready".
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socketserver
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from hetero_api.contract import ENV_GROUP_TOKEN_FILE
from hetero_api.manifest import load_manifest
from hetero_api.v1 import admin_pb2, admin_pb2_grpc, ranks_pb2
from tests.support.fake_gateway import SERVING, FakeGateway


class Group(admin_pb2_grpc.AdminServicer):
    """Ranks that joined, and what GetTopology says of them."""

    def __init__(self, *, name: str, world_size: int, behaviour: str) -> None:
        self.name = name
        self.joined: list[str] = []
        self.failure = ""
        self.epoch = 0
        self._world_size = world_size
        self._behaviour = behaviour

    def join(self, rank: str) -> None:
        self.joined.append(rank)
        self.epoch += self.is_ready

    def leave(self, rank: str) -> None:
        self.joined.remove(rank)

    @property
    def is_ready(self) -> bool:
        return len(set(self.joined)) == self._world_size and self._behaviour != "never-ready"

    def GetTopology(self, request: Any, context: Any) -> admin_pb2.GetTopologyResponse:  # noqa: N802
        state = admin_pb2.GROUP_STATE_READY if self.is_ready else admin_pb2.GROUP_STATE_NEW
        return admin_pb2.GetTopologyResponse(
            name=self.name,
            state=state,
            epoch=self.epoch,
            ranks=[self._rank(rank) for rank in range(self._world_size)],
            exchange=ranks_pb2.EXCHANGE_KIND_SHM,
            reason=self.failure,
            failed=bool(self.failure),
            block_size=16,
            num_blocks=100,
        )

    def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return admin_pb2.GetStatsResponse()

    def _refuse(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "a stand-in has no engine")

    ResetCache = Sleep = WakeUp = Drain = Profile = PlaceExperts = UpdateWeights = _refuse

    LoadAdapter = UnloadAdapter = ListAdapters = _refuse

    def _rank(self, rank: int) -> admin_pb2.RankStatus:
        name = f"cpu-{rank}"
        layer = ranks_pb2.LayerShard(kv_heads=ranks_pb2.UnitRange(begin=rank, end=rank + 1))
        return admin_pb2.RankStatus(
            place=ranks_pb2.RankPlace(rank=rank, pool="cpu", pod_name=name),
            joined=name in self.joined,
            shard=ranks_pb2.RankShard(layers=[layer]),
            weight_bytes=1_000_000,
            kv_bytes=2_000_000,
        )


class RankHandler(socketserver.StreamRequestHandler):
    """One rank: a line "join NAME" or "fail REASON", then silence until either side ends."""

    server: RankServer

    def handle(self) -> None:
        joined: list[str] = []
        try:
            for line in self.rfile:
                verb, _, rest = line.decode().strip().partition(" ")
                if verb == "join":
                    self.server.group.join(rest)
                    joined.append(rest)
                else:
                    self.server.group.failure = rest
        except ConnectionError:
            pass
        for rank in joined:
            self.server.group.leave(rank)


class RankServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, group: Group, *, port: int) -> None:
        super().__init__(("127.0.0.1", port), RankHandler)
        self.group = group


def main() -> int:
    parser = argparse.ArgumentParser()
    options = ("manifest", "model", "host", "inference-port", "admin-port", "ranks-port")
    for name in (*options, "drain-timeout-s"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--http-port", default="0")
    parser.add_argument("--state-file")
    args = parser.parse_args()
    behaviour = os.environ.get("STAND_IN_GATEWAY", "")
    if behaviour.startswith("exit:"):
        print("ERROR the stand-in gateway was told to end", file=sys.stderr)
        return int(behaviour.removeprefix("exit:"))
    Path(os.environ[ENV_GROUP_TOKEN_FILE]).read_text(encoding="ascii")
    resource = load_manifest(Path(args.manifest))
    group = Group(name=resource.metadata.name, world_size=resource.spec.world_size, behaviour=behaviour)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if behaviour == "ignore-term" else stop.set())
    gateway = FakeGateway(f"{args.host}:{args.inference_port}")
    port = gateway.start()
    gateway.set_health(SERVING)
    ranks = RankServer(group, port=int(args.ranks_port))
    threading.Thread(target=ranks.serve_forever, daemon=True).start()
    admin = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(group, admin)
    admin_port = admin.add_insecure_port(f"{args.host}:{args.admin_port}")
    admin.start()
    state = {
        "pid": os.getpid(),
        "name": group.name,
        "inference": f"{args.host}:{port}",
        "admin": f"{args.host}:{admin_port}",
        "http": f"{args.host}:{args.http_port}",
        "ranks": f"{args.host}:{ranks.server_address[1]}",
    }
    if args.state_file is not None:
        partial = Path(f"{args.state_file}.part")
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(args.state_file)
    stop.wait()
    gateway.stop()
    return 0


if __name__ == "__main__":
    # Not sys.exit: threads that serve ranks would be waited for.
    code = main()
    sys.stderr.flush()
    os._exit(code)
