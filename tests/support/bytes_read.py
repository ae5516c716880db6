"""Bytes of mapped files that tensors are made of, each counted once: what a rank has to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero_worker.checkpoints.store import MappedFile


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks what operations read that return no view of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: dict[int, torch.Tensor] = {}
        """A byte for each of a file, by the address of its mapping."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        views = {_address(each) for each in tree_leaves(result) if isinstance(each, torch.Tensor)}
        for given in tree_leaves(args):
            if isinstance(given, torch.Tensor) and (address := _address(given)) in self.marks.keys() - views:
                marked = _same_bytes(self.marks[address], given)
                if func is torch.ops.aten.index.Tensor:
                    marked[tuple(slice(None) if each is None else each for each in args[1])] = 1
                else:
                    marked.fill_(1)
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_bytes(marks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View of the marks of a tensor's elements, with their bytes as one more dimension."""
    size = tensor.itemsize
    strides = [size * stride for stride in tensor.stride()]
    return marks.as_strided((*tensor.shape, size), (*strides, 1), size * tensor.storage_offset())


@contextmanager
def counting_reads() -> Iterator[Callable[[], int]]:
    """Count from here on; what is yielded returns the bytes so far, and begins again at none."""
    with pytest.MonkeyPatch.context() as patch, _Reads() as reads:
        init = MappedFile.__init__

        def mapped(self: MappedFile, path: Path) -> None:
            init(self, path)
            reads.marks[_address(self.bytes)] = torch.zeros_like(self.bytes)

        def count() -> int:
            total = sum(int(marks.sum()) for marks in reads.marks.values())
            for marks in reads.marks.values():
                marks.zero_()
            return total

        patch.setattr(MappedFile, "__init__", mapped)
        yield count
