"""AdapterRegistry: the LoRA adapters of a group, by the names that requests ask for.

It knows what is loaded on the ranks of the current epoch and what has to be loaded again in the next one. An adapter
has a number, by which plans name it, from its load to its unload. Requests that were accepted keep it: it cannot be
unloaded before they have ended. Its salt keeps its prefix cache apart from that of every other adapter, also from that
of an earlier one of the same name. One asyncio loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from hetero_api.spec import AdaptersSpec
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.group.errors import InvalidCommand, WrongState

MAX_NAME_CHARS: Final = 256
_SALT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter."""

    name: str
    number: int
    directory: str
    root: str
    salt: str

    def command(self) -> ranks_pb2.GroupCommand:
        """Return the command that has ranks load it."""
        order = ranks_pb2.LoadAdapter(number=self.number, directory=self.directory, root=self.root)
        return ranks_pb2.GroupCommand(load_adapter=order)


class AdapterRegistry:
    """Adapters of one group."""

    def __init__(self, spec: AdaptersSpec, *, taken: Collection[str]) -> None:
        """`taken`: names of the model itself. Raises InvalidCommand if the resource names an adapter so."""
        self._spec = spec
        self._taken = frozenset(taken)
        self._adapters: dict[str, Adapter] = {}
        self._in_use: dict[int, int] = {}
        for each in spec.load:
            self.add(self.new(each.name, each.directory))

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._adapters.values()))

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of this name; None if it is not loaded."""
        return self._adapters.get(name)

    def serves(self, asked: GenerationRequest) -> bool:
        """Return whether the adapter that a request was read for is loaded still."""
        salt = asked.cache_salt
        return any(each.number == asked.adapter and salt.startswith(each.salt) for each in self)

    def new(self, name: str, directory: str) -> Adapter:
        """Return an adapter that may be loaded, under a free number. Raises InvalidCommand and WrongState."""
        if not self._spec.max_loaded or not self._spec.roots:
            raise WrongState(
                "this group loads no adapters: set spec.engine.adapters.maxLoaded, and roots to the folders that they "
                "may lie in"
            )
        if name in self._taken:
            raise InvalidCommand("name", "is the model's own name")
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidCommand("name", f"must have 1 to {MAX_NAME_CHARS} printable characters")
        if name in self._adapters:
            raise WrongState(f"name: {name!r} is loaded already; unload it first")
        root = self._spec.root_of(directory)
        if root is None:
            raise InvalidCommand(
                "directory", f"must lie in one of spec.engine.adapters.roots ({', '.join(self._spec.roots)})"
            )
        numbers = {adapter.number for adapter in self._adapters.values()}
        free = next((each for each in range(1, self._spec.max_loaded + 1) if each not in numbers), None)
        if free is None:
            raise WrongState(
                f"{len(numbers)} adapters are loaded, as spec.engine.adapters.maxLoaded allows; unload one first"
            )
        return Adapter(name, free, directory, root, secrets.token_hex(_SALT_BYTES))

    def add(self, adapter: Adapter) -> None:
        """Note that an adapter was loaded."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Forget an adapter: no request may ask for it any more. Raises WrongState."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise WrongState(f"name: {name!r} is not loaded")
        if number := self._in_use.get(adapter.number, 0):
            raise WrongState(f"name: {number} requests use {name!r}; try again when they have ended, or abort them")
        return self._adapters.pop(name)

    def begin(self, number: int) -> Callable[[], None]:
        """Count a request of an adapter; return a function that is to be called at its end."""
        self._in_use[number] = self._in_use.get(number, 0) + 1

        def end() -> None:
            self._in_use[number] -= 1

        return end

    def list(self) -> admin_pb2.ListAdaptersResponse:
        """Return what is loaded."""
        return admin_pb2.ListAdaptersResponse(
            adapters=[
                admin_pb2.LoadedAdapter(
                    name=each.name, directory=each.directory, requests=self._in_use.get(each.number, 0)
                )
                for each in self
            ]
        )
