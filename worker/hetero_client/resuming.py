"""A Generate stream that outlives its calls, for the sync and the asyncio client alike.

A call that breaks (UNAVAILABLE, a lost connection) is repeated with the tokens received so far, and the gateway
continues after them, as soon as its health says that it serves. The health call waits for the server, because a channel
of grpc's Python looks for its server only while a call waits. So every request has an id and a seed before it is first
sent.

Invariants: the reader sees one stream, with Started once and no token, text or end twice. A request that is itself
refused is never sent again. All calls together keep the caller's deadline.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Unpack

from grpc_health.v1 import health_pb2

from hetero_api.contract import GATEWAY_SERVICES
from hetero_api.v1 import inference_pb2 as pb
from hetero_client import wire
from hetero_client.errors import (
    DeadlineError,
    IncompleteStreamError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    UnavailableError,
)
from hetero_client.messages import Delta, Event, Finished, GenerateOptions, Prompt, PromptLogprobs, Started

RESUME_TIMEOUT_S: Final = 60.0
UNSTARTED_TIMEOUT_S: Final = 10.0
"""Limit for a stream that has not begun, while nothing has ever answered: a wrong address is reported soon."""
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
_SEED_BITS: Final = 64


@dataclass(slots=True)
class ServerRecord:
    """Facts that a client knows of its server."""

    has_answered: bool = False
    """True once a stream has begun: the address is right. A server that does not answer then may come back."""


class ResumableRequest:
    """State of one request over all its calls. Adds an id and a seed to `request`."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        *,
        timeout_s: float | None,
        resume_timeout_s: float,
        server: ServerRecord,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._request = request
        self._request.request_id = request.request_id or uuid.uuid4().hex
        if not request.sampling.HasField("seed"):
            self._request.sampling.seed = secrets.randbits(_SEED_BITS)
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._server = server
        self._clock = clock
        self._jitter = jitter
        self._received: list[list[int]] = [[] for _ in range(max(1, request.sampling.n))]
        self._finished: set[int] = set()
        self._has_started = False
        self._num_prompt_logprobs = self._num_before = 0
        """Log-probabilities of the prompt that the reader has, and those that came over this call."""
        self._calls = 0
        self._pause_s = FIRST_PAUSE_S
        self._broken_since_s: float | None = None

    @classmethod
    def of_prompt(
        cls, prompt: Prompt, *, final_only: bool, server: ServerRecord, **options: Unpack[GenerateOptions]
    ) -> ResumableRequest:
        """Return a request for the completions of a prompt. Raises InvalidRequestError."""
        return cls(
            wire.generate_request(prompt, final_only=final_only, **options),
            timeout_s=options.get("timeout_s"),
            resume_timeout_s=options.get("resume_timeout_s", RESUME_TIMEOUT_S),
            server=server,
        )

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._request.request_id

    def next_call(self) -> tuple[pb.GenerateRequest, float | None]:
        """Return the next request to send and the time it may take. Raises DeadlineError when no time is left."""
        self._calls += 1
        self._num_before = 0
        if self._calls > 1:
            del self._request.received[:]
            for token_ids in self._received:
                self._request.received.add(token_ids=token_ids)
        return self._request, self._left_s()

    def generate(self, inference: Any) -> Any:
        """Begin the next call over a stub of either API of grpc. Raises DeadlineError when no time is left."""
        request, timeout_s = self.next_call()
        return inference.Generate(request, timeout=timeout_s)

    def watch(self, health: Any) -> Any:
        """Watch the server's health, once it can be reached, for as long as patience lasts."""
        return health.Watch(health_request(), timeout=self.patience_s, wait_for_ready=True)

    def read(self, message: pb.GenerateEvent) -> Event | None:
        """Return the event for the caller; None if it came before, or is of an unknown kind."""
        event = wire.event_from(message)
        if isinstance(event, PromptLogprobs):
            event = self._fresh(event)
        if event is not None and not self._is_new(event):
            event = None
        if isinstance(event, Delta | Finished):
            self._broken_since_s, self._pause_s = None, FIRST_PAUSE_S
        return event

    def check_end(self) -> None:
        """Check that a call that ended with OK finished all completions. Raises IncompleteStreamError."""
        if len(self._finished) < len(self._received):
            raise IncompleteStreamError(
                f"request {self.request_id}: the stream ended with {len(self._finished)} of {len(self._received)} "
                "completions finished"
            )

    def pause_after(self, error: RequestError) -> float:
        """Return the seconds to wait before the next call after one that broke. Raises `error` when it was the last."""
        now_s = self._clock()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        if not self._may_resume(error) or now_s - self._broken_since_s >= self._timeout_s:
            raise error
        pause_s = max(self._pause_s * (0.5 + self._jitter()), _advised_s(error))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        left_s = self._left_s()
        return pause_s if left_s is None else min(pause_s, left_s)

    @property
    def patience_s(self) -> float:
        """Longest wait for a server that serves, before the next call is made anyway."""
        waited_s = 0.0 if self._broken_since_s is None else self._clock() - self._broken_since_s
        patience_s = max(0.0, self._timeout_s - waited_s)
        left_s = self._left_s()
        return patience_s if left_s is None else min(patience_s, left_s)

    @property
    def _timeout_s(self) -> float:
        """Longest time to try again after a call broke."""
        timeout_s = self._resume_timeout_s
        return timeout_s if self._server.has_answered else min(timeout_s, UNSTARTED_TIMEOUT_S)

    def _may_resume(self, error: RequestError) -> bool:
        if isinstance(error, QueueFullError):
            # The caller decides about a request refused at first; a stream that has begun continues.
            return self._has_started
        # Only the server's cancellation arrives here: a caller who cancels reads no further.
        return isinstance(error, UnavailableError | RequestCancelledError)

    def _is_new(self, event: Event) -> bool:
        match event:
            case Started():
                is_new, self._has_started = not self._has_started, True
                self._server.has_answered = True
            case PromptLogprobs():
                is_new = True
            case Delta():
                is_new = event.index not in self._finished
                if is_new:
                    self._received[event.index].extend(event.token_ids)
            case Finished():
                is_new = event.index not in self._finished
                self._finished.add(event.index)
        return is_new

    def _fresh(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """Return what the reader lacks of them; None if it has all: a call that is repeated sends them again."""
        begin = self._num_prompt_logprobs - self._num_before
        self._num_before += len(event.positions)
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._num_before)
        return PromptLogprobs(event.positions[begin:]) if begin < len(event.positions) else None

    def _left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise DeadlineError(
                f"request {self.request_id}: the deadline passed while its stream was being resumed",
                code="DEADLINE_EXCEEDED",
            )
        return left_s


def health_request() -> health_pb2.HealthCheckRequest:
    """Return a request for the health of hetero.v1.Inference."""
    return health_pb2.HealthCheckRequest(service=GATEWAY_SERVICES[0])


def _advised_s(error: RequestError) -> float:
    """Return the seconds that the server advises to wait, or 0."""
    return (error.retry_after_s or 0.0) if isinstance(error, QueueFullError) else 0.0
