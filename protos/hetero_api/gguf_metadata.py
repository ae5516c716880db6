"""Fields of a GGUF file's metadata by their names within an architecture, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero_api.errors import ModelError
from hetero_api.gguf_file import GgufHeader, Scalar
from hetero_api.gguf_model import architecture_of


class GgufMetadata:
    """Metadata of one model; fields are named without the architecture before them."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = architecture_of(header)

    def find(self, name: str, default: Scalar | None = None) -> Scalar | None:
        """Return a field as it is."""
        return self.header.metadata.get(f"{self.architecture}.{name}", default)

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number; without a default it must be there and more than 0."""
        value, least = self.find(name, default), 1 if default is None else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"must be a whole number of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.find(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, f"must be a number, not {value!r}")
        return float(value)

    def listed(self, name: str) -> Sequence[Scalar] | None:
        """Return the entries of a list for the layers that are served; None where there is no such list.

        Raises ModelError for one that has too few.
        """
        found = self.header.lists.get(f"{self.architecture}.{name}")
        if found is not None and len(found) < self.num_layers:
            raise self.error(name, f"must list {self.num_layers} layers, not {len(found)}")
        return found if found is None else found[: self.num_layers]

    def has(self, tensor: str) -> bool:
        """Return whether there is a tensor of this name."""
        return tensor in self.header.tensors

    def in_first_layer(self, tensor: str) -> bool:
        """Return whether the first layer has such a tensor."""
        return self.has(f"blk.0.{tensor}")

    @property
    def num_layers(self) -> int:
        """Layers without those that predict further tokens."""
        layers = self.whole("block_count") - self.whole("nextn_predict_layers", 0)
        if layers < 1:
            raise self.error("nextn_predict_layers", "must be less than block_count")
        return layers

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        usual = self.whole("embedding_length") // self.whole("attention.head_count")
        return self.whole("attention.key_length", usual)

    def error(self, name: str, problem: str) -> ModelError:
        """Return an error that names file and field."""
        return ModelError(f"{self.header.path}: {self.architecture}.{name} {problem}")
