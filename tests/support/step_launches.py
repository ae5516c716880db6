"""What steps that decode give to a GPU, seen without one; a line of JSON for each kind of step.

    python -m tests.support.step_launches ROWS

A dispatch mode counts torch's operators, and fails on what a recorded pass must not do. In a process of its own, which
interprets no kernels.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.absent import SHAPES, AbsentDriver, AbsentGpu, AbsentRank, AbsentStreams
from hetero_worker.backends.cuda.launches import Launch, collected
from hetero_worker.memory.streams import Copies, Moment, Way
from hetero_worker.runners.graphs.breaks import Breaks, Replay
from tests.support.codegen import config_of

CAPABILITY = 90
GREEDY = ranks_pb2.Sampling(temperature=0, top_p=1)
RANDOM = ranks_pb2.Sampling(temperature=1, top_p=1)
FILTERED = ranks_pb2.Sampling(temperature=1, top_p=0.9)
WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount")
"""Operators whose result, or its shape, the host needs."""
MAKES = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "detach",
)
"""Operators that launch nothing, beside those whose result is a view."""


class RecordingError(Exception):
    """A pass that is recorded did what none can."""


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is given to the device. While `is_recording` it refuses waits, and copies from or to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.is_recording = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if self.is_recording and name in WAITS:
            raise RecordingError(f"{name} in a pass that is recorded")
        out = func(*args, **(kwargs or {}))
        devices = {tensor.device for tensor in tensors_in((args, kwargs or {}, out))}
        if SHAPES not in devices:
            return out
        crosses = len(devices) > 1 and name in ("copy_", "_to_copy")
        if self.is_recording and crosses:
            raise RecordingError(f"{name} between host and device in a pass that is recorded")
        if crosses:
            self.counts["copies"] += 1
        elif name not in MAKES and not _is_view(func):
            self.counts["operators"] += 1
        return out

    def note(self, what: str) -> None:
        """A call that is none of torch's."""
        if self.is_recording:
            raise RecordingError(f"{what} in a pass that is recorded")
        self.counts[what] += 1


def _is_view(func: Any) -> bool:
    return any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)


class WatchedMoment:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    @property
    def is_done(self) -> bool:
        self._watcher.note("queries")
        return True

    def wait(self) -> None:
        self._watcher.note("waits")


class WatchedStreams(AbsentStreams):
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def now(self) -> Moment:
        return WatchedMoment(self._watcher)

    def copy(self, way: Way, copies: Copies, *, after: Moment) -> Moment:
        self._watcher.note("copies")
        return WatchedMoment(self._watcher)


class WatchedGraphs:
    """GraphBackend whose segments are watched, and count as one each time that they are replayed."""

    records_device_sums = True

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def reserve(self, num_bytes: int) -> None:
        """There is no memory."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._watcher.is_recording = False

    def begin(self) -> None:
        self._watcher.is_recording = True

    def end(self) -> Replay:
        self._watcher.is_recording = False
        return lambda: self._watcher.note("graphs")

    def free_bytes(self) -> int:
        return 1 << 40


def rank_with_graphs(watcher: Watcher, model: str) -> AbsentRank:
    driver = AbsentDriver(WatchedGraphs(watcher), WatchedStreams(watcher))
    return AbsentRank(config_of(model), backend=AbsentGpu(driver))


def steps_of(model: str, rows: int, sampling: ranks_pb2.Sampling, *, masked: bool) -> list[Counter[str]]:
    """Counts of three steps that decode the rows: prepared, recorded and replayed where steps are recorded."""
    watcher, seen = Watcher(), list[Counter[str]]()
    with collected(CAPABILITY) as launches:
        rank = rank_with_graphs(watcher, model)
        with watcher:
            rank.execute(rank.prompts([8] * rows, [sampling] * rows))
            for _ in range(3):
                seen.append(_counted(rank, watcher, launches, rows=rows, masked=masked))
    return seen


def _counted(rank: AbsentRank, watcher: Watcher, launches: list[Launch], *, rows: int, masked: bool) -> Counter[str]:
    watcher.counts.clear()
    launches.clear()
    rank.execute(ranks_pb2.StepPlan(decode_slots=range(rows), masked_slots=range(rows) if masked else ()))
    return Counter({**watcher.counts, "kernels": len(launches)})


def refused() -> dict[str, str]:
    """What a recording must not do, each done in one: why it was refused."""
    host, there = torch.zeros(1), torch.zeros(1, device=SHAPES)
    watcher = Watcher()
    breaks, moment = Breaks(WatchedGraphs(watcher)), WatchedMoment(watcher)
    doings: dict[str, Callable[[], object]] = {
        "value": there.nonzero,
        "pageable copy": lambda: there.copy_(host),
        "new copy": lambda: host.to(SHAPES),
        "event query": lambda: moment.is_done,
        "wait": moment.wait,
        "allowed": lambda: there.add_(1),
    }
    told = {}
    with watcher:
        for name, do in doings.items():
            try:
                breaks.record(do)
            except RecordingError as error:
                told[name] = str(error)
    return told


def main(rows: int) -> None:
    for name, sampling in {"greedy": GREEDY, "random": RANDOM, "filtered": FILTERED, "masked": GREEDY}.items():
        *_, replayed = steps_of("qwen3-8b", rows, sampling, masked=name == "masked")
        print(json.dumps({"step": name, **replayed}), flush=True)
    *_, alone = steps_of("qwen3-30b-a3b", rows, GREEDY, masked=False)
    print(json.dumps({"step": "experts", **alone}), flush=True)
    print(json.dumps({"step": "refused", **refused()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
