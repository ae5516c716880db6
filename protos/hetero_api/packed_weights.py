"""How a checkpoint of safetensors files holds quantised weights: what `quantization_config` of config.json says.

What is not listed here is refused by name: other methods, widths, activations in other types than weights allow for,
and orders of inputs that are not the tensors' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from hetero_api.errors import ModelError
from hetero_api.weight_format import WeightFormat

FIELD: Final = "quantization_config"
_FLOATS: Final = ("lm_head", ".gate")


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """8-bit floats (E4M3) with a float32 scale for each block of rows and columns; ranks widen them to bfloat16."""

    rows: int
    columns: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, source: str) -> Fp8Blocks | None:
        """From the contents of config.json, `source`; None: not quantised so. Raises ModelError."""
        fields = config.get(FIELD)
        if not isinstance(fields, Mapping) or fields.get("quant_method") != "fp8":
            return None
        return cls(*_Config(fields, f"{source}: {FIELD}").fp8_blocks())


class Packing(Enum):
    """A layout of tensors; worker's `checkpoints/packed_safetensors.py` reads them."""

    AWQ = "awq"
    GPTQ = "gptq"
    """Zero points are stored less one."""
    GPTQ_V2 = "gptq_v2"
    PACKED_INTS = "pack-quantized"
    INTS = "int-quantized"
    MXFP4 = "mxfp4"
    """4-bit floats in groups of 32 inputs with a power of two, of stacked experts only."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Format of a checkpoint's quantised linear layers."""

    packing: Packing
    weights: WeightFormat
    some_are_floats: bool = False
    """Whether linear layers other than the output head are left out."""

    @property
    def is_of_experts(self) -> bool:
        """True if experts are quantised, and nothing else."""
        return self.packing is Packing.MXFP4

    @property
    def method(self) -> str:
        """For a person."""
        return _METHODS[self.packing]

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, source: str) -> PackedWeights | None:
        """From the contents of config.json, `source`; None: not quantised, or in floats. Raises ModelError."""
        fields = config.get(FIELD)
        if not fields or Fp8Blocks.of_config(config, source=source) is not None:
            return None
        if not isinstance(fields, Mapping):
            raise ModelError(f"{source}: {FIELD} must be an object, not {fields!r}")
        return _Config(fields, f"{source}: {FIELD}").packed()


_METHODS: Final = {
    Packing.AWQ: "awq",
    Packing.GPTQ: "gptq",
    Packing.GPTQ_V2: "gptq",
    Packing.PACKED_INTS: "compressed-tensors",
    Packing.INTS: "compressed-tensors",
    Packing.MXFP4: "mxfp4, kept in 8 bits",
}
_MXFP4: Final = WeightFormat(8, 32)
"""It holds twice the 4-bit floats, which are whole numbers up to 12, with half the scales: all of them exactly."""


@dataclass(frozen=True, slots=True)
class _Config:
    fields: Mapping[str, Any]
    source: str

    def packed(self) -> PackedWeights:
        match self.fields.get("quant_method"):
            case "awq":
                return self._awq()
            case "gptq":
                return self._gptq()
            case "compressed-tensors":
                return self._compressed_tensors()
            case "mxfp4":
                return PackedWeights(Packing.MXFP4, _MXFP4, some_are_floats=True)
            case other:
                raise self._unsupported("quant_method", other, ("awq", "gptq", "compressed-tensors", "mxfp4", "fp8"))

    def fp8_blocks(self) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        self._expect("fmt", ("e4m3", "float8_e4m3fn"), absent="e4m3")
        match self.fields.get("weight_block_size"):
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
            case size:
                problem = f"must be two whole numbers, rows and columns, not {size!r}"
                raise ModelError(f"{self.source}.weight_block_size {problem}")

    def _awq(self) -> PackedWeights:
        self._expect("bits", (4,), absent=4)
        self._expect("version", ("gemm",), absent="gemm", lower=True)
        self._expect("zero_point", (True,), absent=True)
        weights = WeightFormat(4, self._group(), has_minimum=True)
        return PackedWeights(Packing.AWQ, weights, self._leaves_out("modules_to_not_convert"))

    def _gptq(self) -> PackedWeights:
        bits = self._expect("bits", (4, 8))
        self._expect("desc_act", (False,), absent=False)
        symmetric = self._expect("sym", (True, False), absent=True)
        layout = self._expect("checkpoint_format", ("gptq", "gptq_v2"), absent="gptq")
        if self.fields.get("dynamic"):
            raise ModelError(f"{self.source}.dynamic: layers of different widths are not supported in gptq")
        return PackedWeights(Packing(layout), WeightFormat(bits, self._group(), has_minimum=not symmetric))

    def _compressed_tensors(self) -> PackedWeights:
        layout = self._expect("format", (Packing.PACKED_INTS.value, Packing.INTS.value))
        self._expect("quantization_status", ("compressed",), absent="compressed")
        if self.fields.get("kv_cache_scheme"):
            raise ModelError(f"{self.source}.kv_cache_scheme is set; a quantised KV cache is not supported")
        groups = self.fields.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            raise ModelError(f"{self.source}.config_groups must hold one group; several are not supported")
        [(name, group)] = groups.items()
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise ModelError(f"{self.source}.config_groups.{name}.weights must say how weights are quantised")
        weights = _Config(group["weights"], f"{self.source}.config_groups.{name}.weights")
        some_are_floats = self._leaves_out("ignore") or group.get("targets", ["Linear"]) != ["Linear"]
        return PackedWeights(Packing(layout), weights.ints(Packing(layout)), some_are_floats)

    def ints(self, packing: Packing) -> WeightFormat:
        """Read one of compressed-tensors' quantization args."""
        self._expect("type", ("int",), absent="int")
        bits = self._expect("num_bits", (4, 8) if packing is Packing.PACKED_INTS else (8,))
        if self.fields.get("actorder") not in (None, "weight", "static"):
            raise self._unsupported("actorder", self.fields["actorder"], (None, "weight"))
        self._expect("dynamic", (False,), absent=False)
        strategy = self._expect("strategy", ("channel", "group"), absent="group")
        symmetric = self._expect("symmetric", (True, False), absent=True)
        return WeightFormat(bits, self._group() if strategy == "group" else 0, has_minimum=not symmetric)

    def _leaves_out(self, name: str) -> bool:
        """Whether the list names more than output head and routers, which are floats anyhow."""
        names = self.fields.get(name) or []
        if not isinstance(names, list):
            raise ModelError(f"{self.source}.{name} must be a list, not {names!r}")
        return any(not str(one).rstrip("$").endswith(_FLOATS) for one in names)

    def _group(self) -> int:
        group = self.fields.get("group_size")
        if isinstance(group, bool) or not isinstance(group, int) or (group != -1 and group < 16):
            raise ModelError(f"{self.source}.group_size must be -1 or a whole number of at least 16, not {group!r}")
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
