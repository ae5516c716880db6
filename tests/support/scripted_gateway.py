"""A gateway that says to one rank what the test tells it to: a real gRPC server, on a Unix socket or on TCP."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_api.v1 import ranks_pb2, ranks_pb2_grpc

TOKEN = "the-token"
_PATIENCE_S = 20.0


class ScriptedGateway(ranks_pb2_grpc.RanksServicer):
    """One stream at a time. `start` binds; use as a context manager to stop.

    Without a folder for its socket it listens on a TCP port of the loopback interface, with `credentials` encrypted.
    """

    def __init__(self, folder: Path | None = None, *, credentials: grpc.ServerCredentials | None = None) -> None:
        self._credentials = credentials
        self.target = "127.0.0.1:0" if folder is None else f"unix:{folder / 'ranks.sock'}"
        self._said: queue.SimpleQueue[ranks_pb2.RankMessage | None] = queue.SimpleQueue()
        self._script: queue.SimpleQueue[ranks_pb2.GatewayMessage | grpc.StatusCode | None] = queue.SimpleQueue()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))

    def start(self) -> None:
        ranks_pb2_grpc.add_RanksServicer_to_server(self, self._server)
        if self._credentials is None:
            port = self._server.add_insecure_port(self.target)
        else:
            port = self._server.add_secure_port(self.target, self._credentials)
        if self.target == "127.0.0.1:0":
            self.target = f"127.0.0.1:{port}"
        self._server.start()

    def __enter__(self) -> ScriptedGateway:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._script.put(None)
        self._server.stop(grace=0).wait()

    def Join(  # noqa: N802
        self, request_iterator: Iterator[ranks_pb2.RankMessage], context: Any
    ) -> Iterator[ranks_pb2.GatewayMessage]:
        if dict(context.invocation_metadata()).get(AUTHORIZATION_KEY) != f"Bearer {TOKEN}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the group's token is wrong")
        listener = futures.ThreadPoolExecutor(max_workers=1)
        listener.submit(self._listen, request_iterator)
        listener.shutdown(wait=False)
        while (item := self._script.get()) is not None:
            if isinstance(item, grpc.StatusCode):
                context.abort(item, "as the test says")
            assert isinstance(item, ranks_pb2.GatewayMessage)
            yield item

    def _listen(self, request_iterator: Iterator[ranks_pb2.RankMessage]) -> None:
        try:
            for message in request_iterator:
                further = [
                    ranks_pb2.RankMessage(epoch=message.epoch, step_result=result) for result in message.further_results
                ]
                message.ClearField("further_results")
                for each in (message, *further):
                    self._said.put(each)
        except grpc.RpcError:
            pass
        self._said.put(None)
        self._script.put(None)  # as a gateway does: a rank that has left is done with

    def heard_nothing(self) -> bool:
        """Whether no message came, and none waits."""
        return self._said.empty()

    def tell(self, epoch: int, **body: Any) -> None:
        """Send a message; the keyword is its body."""
        self._script.put(ranks_pb2.GatewayMessage(epoch=epoch, **body))

    def hang_up(self, code: grpc.StatusCode | None = None) -> None:
        """End the stream, with OK or with a status."""
        self._script.put(code)

    def expect(self, body: str, *, patience_s: float = _PATIENCE_S) -> ranks_pb2.RankMessage:
        """The rank's next message, which must be of this kind; results that travel together are one each."""
        message = self._said.get(timeout=patience_s)
        assert message is not None, f"the rank closed its side; expected {body}"
        assert message.WhichOneof("body") == body, message
        return message

    def hear_beside_heartbeats(self, body: str) -> ranks_pb2.RankMessage:
        """The rank's next message that is no heartbeat, which must be of this kind."""
        while (message := self._said.get(timeout=_PATIENCE_S)) is not None:
            if not message.HasField("heartbeat"):
                assert message.WhichOneof("body") == body, message
                return message
        raise AssertionError(f"the rank closed its side; expected {body}")

    def expect_end(self) -> None:
        """The rank closes its side, and says nothing before."""
        assert self._said.get(timeout=_PATIENCE_S) is None
