"""LoRA adapters as PEFT saves them: a directory with adapter_config.json and adapter_model.safetensors.

An adapter adds scaling · B · (A · x) to linear modules of a model: A is [rank, in], B [out, rank]. A rank reads the
rows of B and the columns of A that belong to its slice of the module's weight. Everything is checked when the adapter
is opened, from the config and the file's header alone, before any tensor is read: an adapter that changes the model in
another way than this, or a module that takes none, is refused with the file and the field or tensor.

Experts have factors of their own each. A file has them by the experts' modules, or as PEFT saves the stacks that
transformers makes of experts: then A is [experts · rank, in], expert by expert, and B [out, rank · experts], with an
expert's columns at every `experts`-th place. Of two stacks, the factors of one are named `base_layer`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import torch
from safetensors import SafetensorError

from hetero_api.errors import ModelError
from hetero_api.model_directory import ADAPTER_CONFIG, ADAPTER_TENSORS, model_file
from hetero_api.sharding import UnitRange
from hetero_api.wrappers import text_name
from hetero_worker.checkpoints.checkpoint import rows_in_order
from hetero_worker.checkpoints.safetensors_store import DTYPES, SafetensorsFile, StoredTensor
from hetero_worker.checkpoints.store import TensorSlice

MAX_RANK: Final = 256
_PREFIX: Final = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\..+")
_INNER: Final = ".base_layer"
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})

Targets = Mapping[str, tuple[int, int]]
"""(out, in) of the weights of modules that take adapters, by the modules' names in the checkpoint."""


class LowRankFactors(NamedTuple):
    """A rank's part of an adapter's product for one module: up · (down · x)."""

    down: torch.Tensor
    """float32 [rank, in]."""
    up: torch.Tensor
    """float32 [out, rank], multiplied by the adapter's scaling."""


class _Stack(NamedTuple):
    """Matrices of all experts of a layer, [out, in] each."""

    experts: int
    out: int
    width: int

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of both factors."""
        return (self.experts * rank, self.width), (self.out, rank * self.experts)


def _stacks_of(targets: Targets) -> dict[str, dict[str, _Stack]]:
    """Return the stacks that transformers makes of experts, by their names, for each module of experts."""
    shapes: dict[str, list[tuple[int, int]]] = {}
    for name, shape in targets.items():
        if (found := _EXPERT.fullmatch(name)) is not None:
            shapes.setdefault(found[1], []).append(shape)
    stacks = {}
    for module, ((columns, hidden), *others) in shapes.items():
        number = (1 + len(others)) // 3  # a gate, an up and a down projection each
        gate_up, down = _Stack(number, 2 * columns, hidden), _Stack(number, hidden, columns)
        stacks[module] = {f"{module}.gate_up_proj": gate_up, f"{module}.down_proj": down}
    return stacks


class LoraAdapter:
    """An open adapter. Use it as a context manager: its file stays open until it exits."""

    def __init__(self, directory: Path, targets: Targets, *, max_rank: int = MAX_RANK) -> None:
        """Read and check the config. Raises ModelError; `__enter__` does for the file of tensors."""
        self._path = directory / ADAPTER_TENSORS
        self._targets = targets
        self._stacks = _stacks_of(targets)
        self._stacked: dict[str, str] = {}
        """Modules of the file by the stacks of experts that they change."""
        from hetero_worker.adapters import peft_config  # Here: it needs pydantic, which ranks of bench/gpu lack.

        config = peft_config.read(directory / ADAPTER_CONFIG)
        if config.r > max_rank:
            raise ModelError(
                f"{directory / ADAPTER_CONFIG}: r: {config.r} is more than the {max_rank} that ranks keep memory for; "
                "raise spec.engine.adapters.maxRank"
            )
        self.rank: Final = config.r
        self._scaling = config.scaling
        self._file: SafetensorsFile | None = None
        self._stored_names: dict[str, str] = {}
        """Names in the file, by those in a text model."""
        self.modules: frozenset[str] = frozenset()
        """Names of the modules that the adapter changes, once it is open."""

    def __enter__(self) -> Self:
        real = model_file(self._path)
        try:
            self._file = SafetensorsFile(real)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{self._path}: cannot be read as safetensors: {error}; save the adapter again") from error
        tensors = self._file.tensors
        self._stored_names = {_in_text_model(name): name for name in tensors}
        if len(self._stored_names) < len(tensors):
            raise ModelError(f"{self._path}: has factors of a module by two names; save the adapter again")
        self.modules = self._check_tensors({name: tensors[stored] for name, stored in self._stored_names.items()})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file = None

    def digests(self) -> dict[str, bytes]:
        """Return the digest of each file. Raises OSError."""
        found: dict[str, bytes] = {}
        for name in (ADAPTER_CONFIG, ADAPTER_TENSORS):
            with model_file(self._path.parent / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").digest()
        return found

    def factors(self, part: TensorSlice) -> LowRankFactors | None:
        """Read the factors of a slice of a module's weight; None if the adapter leaves the module as it is.

        Raises ModelError for numbers that are not finite.
        """
        module = part.name.removesuffix(".weight")
        if module in self.modules:
            down = self._read(module, _DOWN, None, part.column_range)
            up = rows_in_order(self._read(module, _UP, part.row_range), part.order)
        elif part.stack is not None and part.stack.name in self._stacked:
            module, entry = self._stacked[part.stack.name], part.stack.entry
            own, rows = UnitRange(entry.number, entry.number + 1).scaled(self.rank), part.row_range
            rows = UnitRange(entry.first + rows.begin, entry.first + rows.end)
            down = self._read(module, _DOWN, own, part.column_range)
            up = self._read(module, _UP, rows, columns=slice(entry.number, None, entry.entries))
        else:
            return None
        for name, tensor in ((_DOWN, down), (_UP, up)):
            if not tensor.isfinite().all():
                raise ModelError(f"{self._path}: {_PREFIX}{module}{name}: has numbers that are not finite")
        return LowRankFactors(down, up * self._scaling)

    def _read(self, module: str, suffix: str, *ranges: UnitRange | None, columns: slice = slice(None)) -> torch.Tensor:
        """Return a copy of a range of each of the first dimensions, float32; None: all of it. `columns`: of these."""
        assert self._file is not None, "the adapter is open"
        name = self._stored_names[f"{_PREFIX}{module}{suffix}"]
        found = self._file.slice_as(name, DTYPES[self._file.tensors[name].dtype], *ranges)
        return found[:, columns].to(torch.float32, copy=True)

    def _check_tensors(self, tensors: Mapping[str, StoredTensor]) -> frozenset[str]:
        """Return the modules that the file has factors of, after a look at each tensor's name, type and shape."""
        modules = {self._module_of(name) for name in tensors}
        if not modules:
            raise ModelError(f"{self._path}: holds no tensors; save the adapter again")
        for module in sorted(modules):
            for suffix, shape in zip((_DOWN, _UP), self._shapes_of(module, tensors), strict=True):
                name = f"{_PREFIX}{module}{suffix}"
                if name not in tensors:
                    raise ModelError(f"{self._path}: {name}: is missing; save the adapter again")
                stored = tensors[name]
                if stored.dtype not in _FLOATS:
                    raise ModelError(
                        f"{self._path}: {name}: is stored as {stored.dtype}; store it as one of "
                        f"{', '.join(sorted(_FLOATS))}"
                    )
                if stored.shape != shape:
                    raise ModelError(
                        f"{self._path}: {name}: has shape {list(stored.shape)}; r in {ADAPTER_CONFIG} and the model "
                        f"ask for {list(shape)}: is the adapter of this model?"
                    )
        if self._stacked and (single := next((each for each in modules if _EXPERT.fullmatch(each)), None)):
            raise ModelError(
                f"{self._path}: {_PREFIX}{single}: the file has factors of stacks of experts, too; save them in one way"
            )
        return frozenset(modules)

    def _shapes_of(self, module: str, tensors: Mapping[str, StoredTensor]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes that the factors of a module must have; note the stack that a module of experts changes."""
        if module in self._targets:
            out, width = self._targets[module]
            return (self.rank, width), (out, self.rank)
        # By their shapes: which of two stacks is the one inside depends on how the adapter was made.
        stored = [each.shape if each else () for each in (tensors.get(f"{_PREFIX}{module}{s}") for s in (_DOWN, _UP))]
        stacks = self._stacks[module.removesuffix(_INNER)]
        shapes = {name: stack.shapes(self.rank) for name, stack in stacks.items()}
        found = next((name for name, each in shapes.items() if stored == [*each]), None)
        if found is None:
            return next(iter(shapes.values()))
        if found in self._stacked:
            raise ModelError(
                f"{self._path}: {_PREFIX}{module}: changes {found}, as {self._stacked[found]} does; save the adapter "
                "again"
            )
        self._stacked[found] = module
        return shapes[found]

    def _module_of(self, name: str) -> str:
        """Return the module that a tensor belongs to. Raises ModelError if it takes no such tensor."""
        module = name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP)
        if len(name) - len(module) != len(_PREFIX) + len(_DOWN) or not name.startswith(_PREFIX):
            raise ModelError(
                f"{self._path}: {name}: is no LoRA factor of a linear module (PEFT's lora_A.weight or lora_B.weight); "
                "train the adapter without it"
            )
        if module not in self._targets and module.removesuffix(_INNER) not in self._stacks:
            kinds = sorted({target.rpartition(".")[2] for target in self._targets})
            hint = "; experts do with spec.engine.adapters.experts" if ".experts" in module else ""
            raise ModelError(
                f"{self._path}: {name}: {module} takes no adapter in this model; those that do are "
                f"{', '.join(kinds) or 'none'}{hint}"
            )
        return module


def _in_text_model(name: str) -> str:
    """Return a tensor's name where the adapter is of a model of several media, whose text part is served."""
    module = name.removeprefix(_PREFIX)
    return name if module == name else f"{_PREFIX}{text_name(module) or module}"


def adapter_directory(directory: str, root: str) -> Path:
    """Return an adapter's directory, links followed. Raises ModelError unless it lies in `root`."""
    try:
        real, allowed = Path(directory).resolve(strict=True), Path(root).resolve(strict=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: cannot be read: {error}; put the adapter there, on every rank") from error
    if not real.is_relative_to(allowed):
        raise ModelError(f"{directory}: leads to {real}, outside {root}; adapters are read from there only")
    return real
