"""A GraphBackend of host tensors: a tape of torch's operators, replayed into the very tensors that they gave.

It is as strict as a CUDA graph where that matters. A replay works on the memory that was recorded, whatever Python
objects stand for it now; what is not an operator is not replayed; waiting within a segment is an error, as far as it
can be seen (`item`). New memory comes with NaN in it, in every replay anew: who reads what nobody wrote is found out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero_worker.runners.graphs.breaks import Replay

_FREE_BYTES = 1 << 40
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}


class WaitedForDeviceError(AssertionError):
    """What would break a capture on CUDA."""


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    made: tuple[torch.Tensor, ...]
    """Results in memory of their own."""

    def replay(self) -> None:
        again = _tensors(self.function(*self.arguments, **self.options))
        fresh = [tensor for tensor in again if not _is_in(tensor, self.arguments, self.options)]
        for kept, result in zip(self.made, fresh, strict=True):
            kept.copy_(result)
        _spoil(self.function, self.made)


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators while they are done."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def note(self, launch: Callable[[], None]) -> None:
        """Note what is no operator of torch, and writes to tensors that it was given."""
        self.calls.append(_Call(launch, (), {}, ()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if _name(func) in _WAITS:
            raise WaitedForDeviceError(f"{func} in a segment that is recorded")
        result = func(*args, **options)
        made = tuple(tensor for tensor in _tensors(result) if not _is_in(tensor, args, options))
        _spoil(func, made)
        self.calls.append(_Call(func, args, options, made))
        return result


class TapeBackend:
    """Implements GraphBackend."""

    records_device_sums = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.free = [_FREE_BYTES]
        """What `free_bytes` tells, in turn; the last again and again."""
        self.replayed = 0
        """Segments."""
        self.recorded = 0
        self.reserved = 0
        self._tape: _Tape | None = None

    def reserve(self, num_bytes: int) -> None:
        assert not self.recorded, "what is recorded has its place already"
        self.reserved = num_bytes

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._tape is not None:
                self._tape.stop()
                self._tape = None

    def begin(self) -> None:
        assert self._tape is None, "segments do not nest"
        self._tape = _Tape()
        self._tape.start()

    def end(self) -> Replay | None:
        tape, self._tape = self._tape, None
        assert tape is not None, "no segment is being recorded"
        tape.stop()
        if not tape.calls:
            return None
        self.recorded += 1
        return lambda: self._replay(tape.calls)

    def free_bytes(self) -> int:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]

    def _replay(self, calls: Sequence[_Call]) -> None:
        self.replayed += 1
        for call in calls:
            call.replay()


def _name(function: Any) -> str:
    return str(function).split(".")[1]


def _tensors(found: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _is_in(tensor: torch.Tensor, *given: Any) -> bool:
    """Whether it is one of the arguments, or a view of one."""
    address = tensor.untyped_storage().data_ptr()
    return any(address == other.untyped_storage().data_ptr() for other in _tensors(given))


def _spoil(function: Any, made: Sequence[torch.Tensor]) -> None:
    if _name(function) in _EMPTY:
        for tensor in made:
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
