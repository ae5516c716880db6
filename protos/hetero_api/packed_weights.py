"""How a checkpoint of safetensors files holds quantised weights: what `quantization_config` of config.json says.

A configuration has one scheme or several, each for some linear layers. What it says of activations and of the KV cache
is not used: both stay in the arithmetic type. What is not listed here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from hetero_api.errors import ModelError
from hetero_api.module_names import ModuleNames
from hetero_api.weight_format import FP8, INT8, StoredWeights, WeightFormat

FIELD: Final = "quantization_config"
_EARLIER_FIELD: Final = "compression_config"
"""Name of the field in early files of compressed-tensors."""
MODELOPT_FILE: Final = "hf_quant_config.json"
"""Where ModelOpt writes its configuration, beside config.json or instead of the field there."""
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
_LAYERS: Final = (
    *(f"self_attn.{name}" for name in _ATTENTION),
    *(f"{mlp}.{name}" for mlp in ("mlp", "mlp.shared_experts") for name in _MLP),
)
"""Linear layers that memory is counted by: a model has some of them."""
_EXPERTS: Final = tuple(f"mlp.experts.0.{name}" for name in _MLP)
_LARGEST_GROUP: Final = 1 << 16
_CLASS_NAME: Final = re.compile(r"[A-Z]\w*")
_INSTEAD: Final = "use the checkpoint in 16 bits, and spec.model.quantization int8 or int4 to make it as small"
_REFUSED: Final[Mapping[str, str]] = {
    "bitsandbytes": "its weights are blocks across rows, in tables of its own, so that no rank could read a part"
}
"""Reasons by method, for methods that people have many files of."""


class Packing(Enum):
    """A layout of tensors; worker's `checkpoints/packed_layers.py` reads them."""

    AWQ = "awq"
    GPTQ = "gptq"
    """Zero points are stored less one."""
    GPTQ_V2 = "gptq_v2"
    PACKED_INTS = "pack-quantized"
    INTS = "int-quantized"
    FLOATS = "float-quantized"
    """8-bit floats with a float scale for each row, block of rows and columns, or matrix."""
    MXFP4 = "mxfp4"
    """4-bit floats in groups of 32 inputs with a power of two, of stacked experts only."""
    PACKED_MXFP4 = "mxfp4-pack-quantized"
    """The same of any linear layer."""
    PACKED_NVFP4 = "nvfp4-pack-quantized"
    """4-bit floats in groups of 16 inputs with an 8-bit float, which is divided by the matrix's scale."""
    NVFP4 = "nvfp4"
    """The same, multiplied by it."""


_ALL: Final = ModuleNames(are_all=True)
_NONE: Final = ModuleNames()


@dataclass(frozen=True, slots=True)
class Scheme:
    """Format of some of a checkpoint's linear layers."""

    packing: Packing
    weights: WeightFormat
    targets: ModuleNames = field(default=_ALL, repr=False)
    rows: int = 1
    """Rows that share a scale; 0: all. More than 1 of 8-bit floats only."""
    has_order: bool = False
    """True if inputs belong to groups in any order (act-order), which no kernel has: ranks keep such layers in INT8."""

    @property
    def kept(self) -> WeightFormat:
        """The widest format in which a layer is kept."""
        return INT8 if self.has_order else self.weights

    def __str__(self) -> str:
        match self.packing:
            case Packing.FLOATS if self.weights.group:
                kind = f"FP8 in blocks of {self.rows} x {self.weights.group}"
            case Packing.FLOATS:
                kind = "FP8 with a scale for each row" if self.rows else "FP8 with one scale"
            case Packing.MXFP4 | Packing.PACKED_MXFP4:
                kind = "MXFP4"
            case Packing.NVFP4 | Packing.PACKED_NVFP4:
                kind = "NVFP4"
            case _:
                kind = str(self.weights)
        return f"{kind}, act-order" if self.has_order else kind


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Formats of a checkpoint's quantised linear layers."""

    method: str
    """For a person."""
    schemes: tuple[Scheme, ...]
    ignored: ModuleNames = _NONE

    @property
    def is_of_experts(self) -> bool:
        """True if stacked experts are quantised, and nothing else."""
        return self.schemes[0].packing is Packing.MXFP4

    def of_module(self, module: str) -> list[Scheme]:
        """Return the schemes that may be a linear layer's: those that name it before those that are for all."""
        by_name = [scheme for scheme in self.schemes if scheme.targets.match_by_name(module)]
        return by_name + [scheme for scheme in self.schemes if scheme.targets.are_all]

    def stored(self, *, num_layers: int, floats: str, has_experts: bool) -> StoredWeights:
        """Return the formats that bound those of a model with so many layers; layers that are left out are floats."""
        if self.is_of_experts:
            return StoredWeights(experts=self.schemes[0].weights, floats=floats, method=self.method)
        layers = self._widest(num_layers, _LAYERS)
        experts = self._widest(num_layers, _EXPERTS) if has_experts else layers
        if experts is None:
            layers = None  # there is no way to say that experts alone are floats
        is_wide = all(scheme.weights.is_wide for scheme in self.schemes)
        own = experts if experts != layers else None
        return StoredWeights(layers, floats=floats, method=self.method, experts=own, is_wide=is_wide)

    def _widest(self, num_layers: int, names: Sequence[str]) -> WeightFormat | None:
        """Return the widest format of these linear layers; None if one of them is floats."""
        found: set[WeightFormat] = set()
        for module in self._modules(num_layers, names):
            schemes = [] if self.ignored.match(module) else self.of_module(module)
            if not schemes:
                return None
            found.update(scheme.kept for scheme in schemes)
        return max(found, key=lambda weights: (weights.row_bytes(1 << 12), str(weights)))

    def _modules(self, num_layers: int, names: Sequence[str]) -> Iterator[str]:
        """Yield the layers' linear modules: of some layers that are not named, and of all that are."""
        all_names = [self.ignored, *(scheme.targets for scheme in self.schemes)]
        named = {layer for each in all_names for layer in each.layers() if layer < num_layers}
        for layer in sorted(named | {0, num_layers // 2, num_layers - 1}):
            yield from (f"model.layers.{layer}.{name}" for name in names)

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, source: str) -> PackedWeights | None:
        """From the contents of config.json, `source`; None: not quantised. Raises ModelError."""
        name = FIELD if config.get(FIELD) else _EARLIER_FIELD
        fields = config.get(name)
        if not fields:
            return None
        if not isinstance(fields, Mapping):
            raise ModelError(f"{source}: {name} must be an object, not {fields!r}")
        return _Config(fields, f"{source}: {name}").packed()


@dataclass(frozen=True, slots=True)
class _Config:
    fields: Mapping[str, Any]
    source: str

    def packed(self) -> PackedWeights:
        match self._method():
            case "awq":
                return PackedWeights("awq", (self._awq(),), self._names("modules_to_not_convert"))
            case "gptq":
                return PackedWeights("gptq", (self._gptq(),))
            case "compressed-tensors":
                return self._compressed_tensors()
            case "modelopt":
                return self._modelopt()
            case "mxfp4":
                return PackedWeights("mxfp4", (Scheme(Packing.MXFP4, WeightFormat(4, 32, is_float=True)),))
            case "fp8":
                return PackedWeights("fp8", (self._fp8(),), self._names("modules_to_not_convert"))
            case other if isinstance(other, str) and other in _REFUSED:
                raise ModelError(
                    f"{self.source}.quant_method {other!r} is not supported: {_REFUSED[other]}; {_INSTEAD}"
                )
            case other:
                known = ("awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "fp8")
                raise ModelError(f"{self._unsupported('quant_method', other, known)}; {_INSTEAD}")

    def _method(self) -> Any:
        """Return quant_method, which early files of bitsandbytes do not have."""
        method = self.fields.get("quant_method")
        if method is None and any(self.fields.get(f"load_in_{bits}bit") for bits in (4, 8)):
            return "bitsandbytes"
        return method

    def _fp8(self) -> Scheme:
        self._expect("fmt", ("e4m3", "float8_e4m3fn"), absent="e4m3")
        if self.fields.get("weight_block_size") is None:
            return Scheme(Packing.FLOATS, FP8, rows=0)
        return self._blocks("weight_block_size")

    def _blocks(self, name: str) -> Scheme:
        """Return a scheme of 8-bit floats in blocks of rows and columns."""
        match self.fields.get(name):
            case [int(rows), int(columns)] if 0 < rows <= 1 << 16 and 0 < columns <= 1 << 16:
                return Scheme(Packing.FLOATS, WeightFormat(8, columns, is_float=True), rows=rows)
            case size:
                raise ModelError(f"{self.source}.{name} must be two whole numbers, rows and columns, not {size!r}")

    def _awq(self) -> Scheme:
        self._expect("bits", (4,), absent=4)
        self._expect("version", ("gemm",), absent="gemm", lower=True)
        self._expect("zero_point", (True,), absent=True)
        return Scheme(Packing.AWQ, WeightFormat(4, self._group(), has_minimum=True))

    def _gptq(self) -> Scheme:
        bits = self._expect("bits", (4, 8))
        has_order = self._expect("desc_act", (True, False), absent=False)
        symmetric = self._expect("sym", (True, False), absent=True)
        layout = self._expect("checkpoint_format", ("gptq", "gptq_v2"), absent="gptq")
        self._expect("is_marlin_format", (False,), absent=False)
        if self.fields.get("dynamic"):
            raise ModelError(f"{self.source}.dynamic: layers of different widths are not supported in gptq")
        weights = WeightFormat(bits, self._group(), has_minimum=not symmetric)
        return Scheme(Packing(layout), weights, has_order=has_order and bool(weights.group))

    def _compressed_tensors(self) -> PackedWeights:
        self._expect("quantization_status", ("compressed",), absent="compressed")
        groups = self.fields.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ModelError(f"{self.source}.config_groups must hold at least one group")
        if self.fields.get("transform_config"):
            raise ModelError(f"{self.source}.transform_config is set; rotated weights are not supported; {_INSTEAD}")
        sparsity = self.fields.get("sparsity_config")
        if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
            raise ModelError(
                f"{self.source}.sparsity_config: weights without their zeros are not supported; {_INSTEAD}"
            )
        schemes = [self._of_group(str(name), group) for name, group in groups.items()]
        return PackedWeights("compressed-tensors", tuple(schemes), self._names("ignore"))

    def _of_group(self, name: str, group: Any) -> Scheme:
        source = f"{self.source}.config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise ModelError(f"{source}.weights must say how weights are quantised")
        own = group.get("format") is not None
        layout = _Config(group, source) if own else self
        scheme = _Config(group["weights"], f"{source}.weights").arguments(layout)
        return replace(scheme, targets=_Config(group, source).targets())

    def targets(self) -> ModuleNames:
        """Return the modules that a group of compressed-tensors is for."""
        names = self.fields.get("targets")
        if names is None or names == ["Linear"]:
            return _ALL
        found = ModuleNames.of(names, field_name=f"{self.source}.targets")
        classes = sorted(name for name in found.parts if _CLASS_NAME.fullmatch(name))
        if classes not in ([], ["Linear"]):
            raise self._unsupported("targets", ", ".join(classes), ("Linear", "names of modules", "re: patterns"))
        return ModuleNames(found.parts, found.patterns, are_all=bool(classes))

    def arguments(self, layout: _Config) -> Scheme:
        """Read one of compressed-tensors' quantization args, which `layout.format` says the packing of."""
        kind = self._expect("type", ("int", "float"), absent="int")
        bits = self._expect("num_bits", (8, 4))
        known = {
            ("int", 4): ("pack-quantized",),
            ("int", 8): ("pack-quantized", "int-quantized", "naive-quantized"),
            ("float", 8): ("float-quantized", "naive-quantized"),
            ("float", 4): ("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
        }
        name = layout._expect("format", known[kind, bits])
        self._expect("dynamic", (False,), absent=False)
        if kind == "int":
            return self._ints(Packing.INTS if name == "naive-quantized" else Packing(name), bits)
        self._expect("symmetric", (True,), absent=True)
        return self._wide_floats() if bits == 8 else self._narrow_floats(Packing(name))

    def _ints(self, packing: Packing, bits: int) -> Scheme:
        order = self._expect("actorder", ("group", "weight", "static", False), absent=False)
        strategy = self._expect("strategy", ("channel", "group"), absent="group")
        symmetric = self._expect("symmetric", (True, False), absent=True)
        group = self._group() if strategy == "group" else 0
        weights = WeightFormat(bits, group, has_minimum=not symmetric)
        return Scheme(packing, weights, has_order=order == "group" and bool(group))

    def _wide_floats(self) -> Scheme:
        strategy = self._expect("strategy", ("channel", "tensor", "block"), absent="tensor")
        if strategy == "block":
            return self._blocks("block_structure")
        return Scheme(Packing.FLOATS, FP8, rows=1 if strategy == "channel" else 0)

    def _narrow_floats(self, packing: Packing) -> Scheme:
        is_nv = packing is Packing.PACKED_NVFP4
        self._expect("strategy", ("tensor_group",) if is_nv else ("group",))
        group = self._expect("group_size", (16 if is_nv else 32,))
        return Scheme(packing, WeightFormat(4, group, is_float=True))

    def _modelopt(self) -> PackedWeights:
        """Read ModelOpt's: which of the two formats a layer has is seen from its tensors."""
        known = ("NVFP4", "FP8", "MIXED_PRECISION")
        name = self._expect("quant_algo", known)
        floats = Scheme(Packing.FLOATS, FP8, rows=0)
        nvfp4 = Scheme(Packing.NVFP4, WeightFormat(4, 16, is_float=True))
        self._expect("group_size", (16,), absent=16)
        schemes = {"NVFP4": (nvfp4,), "FP8": (floats,), "MIXED_PRECISION": (nvfp4, floats)}[name]
        left_out = "exclude_modules" if "exclude_modules" in self.fields else "ignore"
        return PackedWeights("modelopt", schemes, self._names(left_out))

    def _names(self, name: str) -> ModuleNames:
        return ModuleNames.of(self.fields.get(name), field_name=f"{self.source}.{name}")

    def _group(self) -> int:
        group = self.fields.get("group_size")
        if isinstance(group, bool) or not isinstance(group, int) or not (group == -1 or 16 <= group <= _LARGEST_GROUP):
            raise ModelError(
                f"{self.source}.group_size must be -1 or a whole number from 16 to {_LARGEST_GROUP}, not {group!r}"
            )
        return max(group, 0)

    def _expect(self, name: str, known: tuple[Any, ...], *, absent: Any = None, lower: bool = False) -> Any:
        value = self.fields.get(name)
        value = absent if value is None else value
        value = value.lower() if lower and isinstance(value, str) else value
        if not any(type(value) is type(one) and value == one for one in known):
            raise self._unsupported(name, value, known)
        return value

    def _unsupported(self, name: str, value: Any, known: tuple[Any, ...]) -> ModelError:
        names = ", ".join(map(str, known))
        return ModelError(f"{self.source}.{name} {value!r} is not supported; supported: {names}")
