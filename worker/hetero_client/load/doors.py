"""Doors of a running server, for requests of a load: gRPC, and the OpenAI API over HTTP.

Both send prompts of token ids and ask for a fixed number of tokens, so that lengths are exact. Greedy: what the model
says does not matter. Streams may be used from several threads at once.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final, Protocol

from hetero_client.access import Access
from hetero_client.channel import check_encrypted
from hetero_client.client import HeteroClient
from hetero_client.errors import CredentialsError, NotConnectedError, RequestError
from hetero_client.messages import Delta, SamplingParams

_TIMEOUT_S: Final = 600.0
"""Longest silence of an answer over HTTP."""
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_MOST_WORDS: Final = 200
"""Characters of a refusal that are told."""


class Door(Protocol):
    """A way into a running server."""

    def stream(self, prompt: Sequence[int], *, output_tokens: int) -> Iterator[int]:
        """Yield the number of tokens of each piece of an answer as it comes. Raises RequestError."""
        ...

    def close(self) -> None:
        """Close the door's connections."""
        ...


class GrpcDoor:
    """`hetero.v1.Inference`. Broken streams are not resumed: a load counts them as failed."""

    def __init__(self, client: HeteroClient) -> None:
        self._client = client

    def stream(self, prompt: Sequence[int], *, output_tokens: int) -> Iterator[int]:
        """See `Door.stream`."""
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0)
        with self._client.generate(list(prompt), sampling=sampling, resume_timeout_s=0) as events:
            yield from (len(event.token_ids) for event in events if isinstance(event, Delta) and event.token_ids)

    def close(self) -> None:
        """See `Door.close`."""
        self._client.close()


class HttpDoor:
    """`/v1/completions` at `address` ("host:port"), a connection for each request."""

    def __init__(self, address: str, *, access: Access) -> None:
        if access.certificate is not None:
            raise CredentialsError("a client's certificate is shown over gRPC only; leave it out for --door http")
        check_encrypted(address, access)
        self._address = address
        self._tls = _tls_of(access)
        self._headers = {"Content-Type": "application/json", **{name.title(): value for name, value in access.metadata}}
        self._model = ""
        self._sockets: set[socket.socket | None] = set()

    def stream(self, prompt: Sequence[int], *, output_tokens: int) -> Iterator[int]:
        """See `Door.stream`."""
        body = {
            "model": self._model_name(), "prompt": list(prompt), "max_tokens": output_tokens, "ignore_eos": True,
            "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        seen = 0
        for chunk in self._events("POST", "/v1/completions", json.dumps(body)):
            count = (chunk.get("usage") or {}).get("completion_tokens", seen)
            if count > seen:
                yield count - seen
                seen = count

    def close(self) -> None:
        """See `Door.close`."""
        for each in filter(None, list(self._sockets)):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # ends reads of other threads

    def _model_name(self) -> str:
        """Return the name of the model that is served; asked for once."""
        if not self._model:
            (answer,) = self._events("GET", "/v1/models", None)
            try:
                self._model = answer["data"][0]["id"]
            except (LookupError, TypeError) as error:
                raise RequestError(f"{self._address}: /v1/models lists no model") from error
        return self._model

    def _events(self, method: str, path: str, body: str | None) -> Iterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event, or of an answer that is no stream. Raises RequestError."""
        connected: socket.socket | None = None
        try:
            with closing(self._connect()) as connection:
                connection.connect()
                self._sockets.add(connected := connection.sock)
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
                if response.status != http.HTTPStatus.OK:
                    words = response.read().decode(errors="replace")[:_MOST_WORDS]
                    raise RequestError(f"HTTP {response.status}: {words}", code=str(response.status))
                yield from _read_events(response)
        except (OSError, http.client.HTTPException) as error:
            raise NotConnectedError(f"{self._address}: {error}", code="UNAVAILABLE") from error
        except ValueError as error:
            raise RequestError(f"{self._address}: the answer is not JSON: {error}") from error
        finally:
            self._sockets.discard(connected)

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        return http.client.HTTPSConnection(self._address, timeout=_TIMEOUT_S, context=self._tls)


def _tls_of(access: Access) -> ssl.SSLContext | None:
    if not access.uses_tls:
        return None
    return ssl.create_default_context(cadata=access.ca.decode() if access.ca is not None else None)


def _read_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if "event-stream" not in response.headers.get("Content-Type", ""):
        yield json.load(response)
        return
    for line in response:
        if line.startswith(_DATA) and (data := line.removeprefix(_DATA).strip()) != _DONE:
            event = json.loads(data)
            if "error" in event:
                raise RequestError(str(event["error"].get("message", event["error"])))
            yield event
