"""Streams and pinned memory of one CUDA device."""

from __future__ import annotations

from contextlib import suppress

import torch

from hetero_worker.memory.streams import Copies, Moment, Way


class _CudaMoment:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """Implements DeviceStreams; work that a thread gives to the device is on torch's current stream.

    Memory is pinned by cudaHostRegister: a limit on locked memory (ulimit -l) does not bind the driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in Way}  # type: ignore[no-untyped-call]

    def now(self) -> Moment:
        """Record an event on the current stream."""
        return _CudaMoment(torch.cuda.current_stream(self._device).record_event())

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised pinned tensor."""
        # torch keeps what was pinned once, and gives it out again only when the copies that use it are done.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:
        """Copy on the way's stream after `after`; return the moment when it is done."""
        stream = self._streams[way]
        stream.wait_event(_event(after))
        with torch.cuda.stream(stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        return _CudaMoment(stream.record_event())

    def compute_after(self, moment: Moment) -> None:
        """Let later work of the current stream wait for the moment."""
        torch.cuda.current_stream(self._device).wait_event(_event(moment))

    def settle(self) -> None:
        """Wait for the copies of both ways."""
        for stream in self._streams.values():
            stream.synchronize()

    def pin(self, address: int, num_bytes: int) -> str:
        """Register the memory with the driver; return the reason if it refuses, else ""."""
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
            return "" if code == 0 else self._reason(code)

    def unpin(self, address: int) -> None:
        """Undo `pin`. Raises RuntimeError for memory that is not pinned."""
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))  # type: ignore[no-untyped-call]

    def _reason(self, code: int) -> str:
        """Return the error's text, and clear it: the runtime keeps it until the next launch of a kernel asks."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)
        try:
            torch.cuda.check_error(code)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return f"CUDA error {code}"


def _event(moment: Moment) -> torch.cuda.Event:
    if not isinstance(moment, _CudaMoment):
        raise TypeError(f"a CUDA stream cannot wait for a {type(moment).__name__}")
    return moment.event
