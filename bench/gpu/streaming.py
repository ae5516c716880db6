"""Weight streaming, for comparison: weights that do not fit the device come over the bus for every token.

A competitor at its best: one row goes through every layer's weights as one product of a matrix and a vector, and
nothing else is computed. Layers that lie on the host come into two buffers in turn, on a stream of their own, while the
layer before is multiplied with. Their source is one pinned piece larger than any cache, read over and over: what counts
is the bus, and 25 GB are not pinned in a minute.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, Final

import torch

from bench.gpu.orders import Stream
from hetero_worker.backends.base import DeviceBackend

_TOKENS: Final = 3
_BUFFERS: Final = 2


def seconds_a_token(order: Stream, backend: DeviceBackend) -> float:
    """The best of a few, after one that warms up. Takes num_layers - num_streamed layers of device memory."""
    with torch.inference_mode():
        stream = _Streaming(order, backend)
        times = [stream.token_s() for _ in range(1 + _TOKENS)]
    return min(times[1:])


class _Streaming:
    def __init__(self, order: Stream, backend: DeviceBackend) -> None:
        self._order = order
        self._device = backend.device
        self._is_cuda = backend.device.type == "cuda"
        dtype = getattr(torch, order.dtype)
        rows = order.layer_bytes // (order.hidden_size * dtype.itemsize)
        shape, device = (rows, order.hidden_size), backend.device
        self._row = torch.ones(order.hidden_size, 1, dtype=dtype, device=device)
        self._resident = [
            torch.empty(shape, dtype=dtype, device=device).fill_(0.01)
            for _ in range(order.num_layers - order.num_streamed)
        ]
        self._source = torch.zeros(shape, dtype=dtype, pin_memory=self._is_cuda)
        self._buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(_BUFFERS)]
        self._copies: Any = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._arrived = [self._event() for _ in range(_BUFFERS)]
        self._used = [self._event() for _ in range(_BUFFERS)]

    def token_s(self) -> float:
        """One row through all layers, streamed ones spread evenly among the others."""
        order = self._order
        self._settle()
        began_s = time.perf_counter()
        resident = iter(self._resident)
        streamed = 0
        for layer in range(order.num_layers):
            if (layer + 1) * order.num_streamed // order.num_layers > streamed:
                self._multiply_streamed(streamed % _BUFFERS)
                streamed += 1
            else:
                torch.mm(next(resident), self._row)
        self._settle()
        return time.perf_counter() - began_s

    def _settle(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def _multiply_streamed(self, number: int) -> None:
        buffer = self._buffers[number]
        with torch.cuda.stream(self._copies) if self._is_cuda else nullcontext():
            self._wait(self._copies, self._used[number])
            buffer.copy_(self._source, non_blocking=True)
            self._record(self._arrived[number])
        if self._is_cuda:
            torch.cuda.current_stream().wait_event(self._arrived[number])
        torch.mm(buffer, self._row)
        self._record(self._used[number])

    def _event(self) -> Any:
        return torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def _wait(self, stream: Any, event: Any) -> None:
        if self._is_cuda:
            stream.wait_event(event)

    def _record(self, event: Any) -> None:
        """On the stream in force."""
        if self._is_cuda:
            event.record()
