"""Both ways of drawing: from logits on the host, and the device's, played on the host's tensors.

Sampler tests say `usefixtures("both_paths")` and run on each; the fixture is in tests/unit/worker_model/conftest.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import pytest
import torch

from hetero_worker.backends.base import HOST
from hetero_worker.distributed.staging import PlainStaging
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.sampling.device_draws import DeviceDrawing
from hetero_worker.sampling.device_scores import DrawKernels, TorchDrawKernels
from hetero_worker.sampling.drawing import HOST_DRAWING, ShardDrawing, StartedDraws
from hetero_worker.sampling.request import SamplingRow
from tests.support import sampling_reference

PATHS = ("host", "device", "mixed")


def device_drawing(kernels: DrawKernels | None = None) -> DeviceDrawing:
    """The device's drawing, of a device that is the host."""
    return DeviceDrawing(HOST, kernels or TorchDrawKernels(), PlainStaging().start_to_host)


class AlternatingDrawing:
    """A mixed group's: by turns the device's and the host's, as shards happen to come."""

    name = "mixed"

    def __init__(self) -> None:
        self._device = device_drawing()
        self._turn = 0

    def start(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> StartedDraws:
        self._turn += 1
        drawing: ShardDrawing = self._device if self._turn % 2 else HOST_DRAWING
        return drawing.start(rows, logits, begin)

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        return self._device.to_host(logits, chosen)

    def summary(self) -> str | None:
        return None


@contextmanager
def drawn_by(drawing: ShardDrawing, *modules: ModuleType) -> Iterator[None]:
    """`sample_tokens` in these modules and in the reference's draws on this path."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampling_reference, *modules):
            if hasattr(module, "sample_tokens"):
                patch.setattr(module, "sample_tokens", partial(sample_tokens, drawing=drawing))
        yield


def path(name: str) -> ShardDrawing:
    """Of one of PATHS."""
    paths: dict[str, ShardDrawing] = {"host": HOST_DRAWING, "device": device_drawing(), "mixed": AlternatingDrawing()}
    return paths[name]
