"""RecordingGuard: sees what torch does while native operations are recorded, for that is not recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RecordingGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that lists torch's operators that write or allocate. Views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        """Names of the operators that are not free, in order."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else the first call imports torch's compiler, to keep it out of here: a second, and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        changes = func._schema.is_mutable and func is not torch.ops.aten.detach_.default  # which changes no number
        if changes or not _is_view(args, result):
            self.seen.append(str(func))
        return result


def _is_view(arguments: tuple[Any, ...], result: object) -> bool:
    given = {_storage(tensor) for tensor in _tensors(arguments)}
    return all(_storage(tensor) in given - {None} for tensor in _tensors(result))


def _storage(tensor: torch.Tensor) -> int | None:
    """None: it has none, as tensors in a kernel's own layout."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
